"""Labelled texts: files, and their order as demonstrations."""

import json
from collections import Counter
from pathlib import Path

import pytest

from laconic.errors import InputError
from laconic.evaluation.labelled_texts import LabelledText, load_labelled_texts, order_demonstrations
from tests.conftest import shared_dir

ROWS = [LabelledText(f"text {i}", "abc"[(i % 6) // 3 + (i % 6 == 5)]) for i in range(60)]


@pytest.mark.parametrize(
    ("file", "counts", "labels"),
    [
        ("clinc150/clinc150.jsonl", {"train": 15100, "valid": 3100, "test": 5500}, 151),
        ("banking77/banking77.jsonl", {"train": 10003, "test": 3080}, 77),
    ],
)
def test_load_labelled_texts_of_shared_data_sets(file: str, counts: dict[str, int], labels: int) -> None:
    result = load_labelled_texts(shared_dir() / "data" / file)
    assert Counter(row.split for row in result) == counts
    assert len({row.label for row in result}) == labels


def test_load_labelled_texts_refuses_invalid_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "label": "b"}\n')
    with pytest.raises(InputError, match="fewer than two different labels"):
        load_labelled_texts(file)
    file.write_text('{"text": "a", "label": [3]}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:1: label: not a string"):
        load_labelled_texts(file)


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        ([{"text": "a", "label": 0}, {"text": "b", "label": 1}], ["0", "1"]),
        ([{"text": "a", "label": 1234567.0}, {"text": "b", "label": True}], ["1234567", "True"]),
        (
            [{"text": "a", "label": 0, "label_text": "no"}, {"text": "b", "label": 1, "label_text": "yes"}],
            ["no", "yes"],
        ),
        ([{"utterance": "a", "label": "x"}, {"utterance": "b", "label": "y"}], ["x", "y"]),
        ([{"query": "a", "intent": "x"}, {"query": "b", "intent": "y"}], ["x", "y"]),
    ],
)
def test_load_labelled_texts_of_published_columns(
    tmp_path: Path, rows: list[dict[str, object]], labels: list[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_labelled_texts(tmp_path / "a.jsonl")
    assert [(row.text, row.label) for row in loaded] == [("a", labels[0]), ("b", labels[1])]


def test_order_demonstrations_by_seed() -> None:
    first = order_demonstrations(ROWS, 0)
    assert sorted(first) == sorted(ROWS)
    assert first == order_demonstrations(ROWS, 0) != order_demonstrations(ROWS, 1)
    assert first != ROWS


def test_order_demonstrations_balanced() -> None:
    result = order_demonstrations(ROWS, 0, balanced=True)
    assert sorted(result) == sorted(ROWS)
    counts = Counter(row.label for row in ROWS)
    for n in range(3, 3 * min(counts.values()) + 1, 3):
        assert len(set(Counter(row.label for row in result[:n]).values())) == 1
    assert result != order_demonstrations(ROWS, 1, balanced=True)
