"""Intent data as streams: shipped data sets, disjoint splits, orders of a seed, line format."""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from laconic.data.tokenizer import build_byte_tokenizer, load_tokenizer
from laconic.errors import InputError
from laconic.evaluation.class_incremental import intent_data
from laconic.evaluation.class_incremental.intent_data import (
    IntentRows,
    build_stream,
    label_to_text,
    load_intents,
    normalise_text,
)
from laconic.evaluation.labelled_texts import LabelledText
from tests.conftest import needs, shared_dir

LABELS = ("card_lost", "Top_up?", "PIN change", "pay_w2")
LICENCE = "CC0 1.0"  # the rows below were made for this test


def rows(per_class: int = 6) -> list[LabelledText]:
    stream = [LabelledText(f"{label} text {i}", label, "train") for i in range(per_class) for label in LABELS]
    stream += [LabelledText(f"{label} asked {i}", label, "test") for i in range(2) for label in LABELS]
    return stream


def intents(per_class: int = 6) -> IntentRows:
    return intent_data.deduplicate_splits(rows(per_class), "four")


@lru_cache
def at_hand(name: str) -> IntentRows:
    return load_intents(name, shared_dir() / "data")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "counts", "left_out", "classes"),
    [("clinc150", (14966, 2995, 4500), 39, 150), ("banking77", (9978, 0, 3080), 25, 77)],
)
def test_load_intents_of_shipped_files(name: str, counts: tuple[int, int, int], left_out: int, classes: int) -> None:
    got = at_hand(name)
    assert (len(got.train), len(got.valid), len(got.test)) == counts
    assert got.num_dropped == left_out  # the published splits share texts
    assert len({row.label for row in got.train}) == len({row.label for row in got.test}) == classes
    for compared in (str, normalise_text):
        texts = [{compared(row.text) for row in part} for part in got[:3]]
        assert texts[0].isdisjoint(texts[1] | texts[2])
        assert texts[1].isdisjoint(texts[2])
    assert "oos" not in {row.label for row in got.train}


@pytest.mark.medium
def test_build_stream_of_shipped_file() -> None:
    tokenizer = load_tokenizer(shared_dir() / "models" / "stories260k")
    got = at_hand("clinc150")
    stream = build_stream(
        got, tokenizer, 3, name="clinc150", classes_per_task=15, max_test_per_class=1, max_train_per_class=2
    )
    assert [len(task) for task in stream.task_classes] == [15] * 10
    assert sorted(k for task in stream.task_classes for k in task) == list(range(150))
    assert [len(task) for task in stream.train] == [30] * 10
    assert [len(task) for task in stream.test] == [15] * 10
    assert stream.start_ids == (tokenizer.bos_token_id,)
    item = stream.train[0][0]
    assert stream.training_ids(item)[-1:] == stream.line_end_ids == (13,)
    decoded = tokenizer.decode(stream.training_ids(item))
    labels = sorted({row.label for row in got.train})
    assert decoded.endswith(f"→ {label_to_text(labels[item.label])}\n")


def test_deduplicate_splits_drops_repeated_texts() -> None:
    stream = rows()
    stream += [LabelledText("Card_lost, ASKED: 0!", "card_lost", "train"), LabelledText("both", "card_lost", "valid")]
    stream += [LabelledText("Both?", "card_lost", "train")]
    got = intent_data.deduplicate_splits(stream, "four")
    assert got.num_dropped == 1 + 1
    assert {normalise_text(row.text) for row in got.train}.isdisjoint(
        normalise_text(row.text) for row in [*got.valid, *got.test]
    )
    assert normalise_text("Card_lost, ASKED: 0!") == normalise_text("card_lost asked 0")
    assert normalise_text("हिंदी, हिंदू?") == "हिंदी हिंदू"  # with their vowel signs, which are marks
    assert normalise_text("cafe\u0301!") == "café"
    assert normalise_text(" 🙂 ") != normalise_text("🙁")


def test_build_stream_divides_shuffled_classes() -> None:
    tokenizer = build_byte_tokenizer()
    orders = [build_stream(intents(), tokenizer, seed, name="four", classes_per_task=2) for seed in range(6)]
    for stream in orders:
        assert sorted(k for task in stream.task_classes for k in task) == [0, 1, 2, 3]
        for i, task in enumerate(stream.task_classes):
            assert {item.label for item in stream.train[i]} == {item.label for item in stream.test[i]} == set(task)
            assert len(stream.train[i]) == len(set(stream.train[i])) == 12
        assert stream.seen_classes(0) == sorted(stream.task_classes[0])
        assert stream.seen_classes(1) == [0, 1, 2, 3]
    assert len({stream.task_classes for stream in orders}) > 1
    assert orders[0] == build_stream(intents(), tokenizer, 0, name="four", classes_per_task=2)
    labels = [item.label for item in orders[0].train[0]]
    assert labels != sorted(labels)  # shuffled within the task
    limits = build_stream(
        intents(), tokenizer, 0, name="four", classes_per_task=2, max_test_per_class=1, max_train_per_class=3
    )
    assert [len(task) for task in limits.test] == [2, 2]
    assert [Counter(item.label for item in task).most_common()[0][1] for task in limits.train] == [3, 3]
    other = build_stream(intents(), tokenizer, 1, name="four", classes_per_task=2, max_test_per_class=1)
    assert {item for task in limits.test for item in task} == {item for task in other.test for item in task}


def test_build_stream_line_format() -> None:
    tokenizer = build_byte_tokenizer()
    stream = build_stream(intents(), tokenizer, 0, name="four", classes_per_task=2)
    labels = ["pin change", "top up", "card lost", "pay w2"]
    assert [bytes(ids).decode() for ids in stream.label_ids] == [f" {label}" for label in labels]
    assert [label_to_text(label) for label in ("reverted_card_payment?", "rollover_401k")] == [
        "reverted card payment",
        "rollover 401k",
    ]
    line = bytes(stream.training_ids(stream.train[0][0])).decode()
    assert line.endswith(f" → {labels[stream.train[0][0].label]}\n")
    assert stream.start_ids == (256,)


def test_load_intents_refuses_invalid_data(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    with pytest.raises(InputError, match=r"clinc150: no file .*; give the folder that contains clinc150/clinc150"):
        load_intents("clinc150", tmp_path)
    with pytest.raises(InputError, match="dbpedia14 is not on the Hub"):
        load_intents("dbpedia14")
    with pytest.raises(InputError, match="do not divide into two or more tasks of 3"):
        build_stream(intents(), tokenizer, 0, name="four", classes_per_task=3)
    with pytest.raises(InputError, match="class card_lost has no test row"):
        intent_data.deduplicate_splits(
            [row for row in rows() if (row.label, row.split) != ("card_lost", "test")], "four"
        )
    with pytest.raises(InputError, match="those of another label"):
        intent_data.deduplicate_splits(
            [*rows(), LabelledText("a", "top up", "train"), LabelledText("b", "top up", "test")], "four"
        )
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:1: no field label"):
        load_intents("banking77", tmp_path / "a.jsonl")


def test_build_stream_refuses_tokenizer_that_merges_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_byte_tokenizer()
    monkeypatch.setattr(tokenizer, "encode", lambda text, add_special_tokens=True: [len(text)])
    with pytest.raises(InputError, match="the tokenizer merges →"):
        build_stream(intents(), tokenizer, 0, name="four", classes_per_task=2)


def test_load_hub_utterances_by_class_name(monkeypatch: pytest.MonkeyPatch) -> None:
    needs("datasets")
    import datasets

    test_texts: list[tuple[str, str | None, str]] = []

    def load_dataset(repo: str, config: str | None, *, split: str, revision: str | None) -> Any:
        test_texts.append((repo, config, split))
        part = "test" if split == "test" else "train"
        odd_rows = [row for row in rows() if row.split == part] + [LabelledText(f"odd {split}", "oos", part)]
        names = datasets.ClassLabel(names=[*LABELS, "oos"])
        column = "intent" if config else "label"
        features = datasets.Features({"text": datasets.Value("string"), column: names})
        texts = [f"{split} {row.text}" for row in odd_rows]
        return datasets.Dataset.from_dict({"text": texts, column: [row.label for row in odd_rows]}, features=features)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    got = load_intents("clinc150")
    assert test_texts == [("clinc/clinc_oos", "plus", split) for split in ("train", "validation", "test")]
    assert {row.label for row in got.train} == set(LABELS)
    assert len(got.valid) == 24
    assert len(load_intents("banking77").test) == 9  # with its row of oos, which is a class there
