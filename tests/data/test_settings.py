"""The [data] table: what cannot be meant together is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from laconic.config.data import DataConfig, FactRecallConfig, TextConfig, is_row_file

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, 'path: absent; kind "jsonl" needs a file of training rows'),
    ({"kind": "digits", "format": "digits", "path": "x"}, 'kind "digits" reads no file; leave the key out'),
    ({"kind": "digits"}, '"digits" goes with "digits" alone'),
    ({"path": "x", "format": "digits"}, '"digits" goes with "digits" alone'),
    ({"path": "x", "format": "coconut"}, "takes every step; set chain"),
    ({"path": "x", "format": "icot"}, "takes every step; set chain"),
    ({"path": "x", "separator": "eos"}, 'of format "codi" alone, not'),
    ({"path": "x", "name": "gsm8k"}, 'name: of kind "catalog" or "text", not .jsonl.; set data.source'),
    ({"path": "x", "root": "data"}, 'root: of kind "catalog", not .jsonl.; set data.source'),
    ({"kind": "text"}, 'path: kind "text" needs a file of documents, or one data.name on the hub, and not both'),
    ({"kind": "text", "path": "x", "name": "y/z"}, "or one data.name on the hub, and not both"),
    ({"kind": "text", "name": ("y/z", "a/b")}, "or one data.name on the hub, and not both"),
    ({"kind": "text", "path": "x", "text": {"window": 1}}, "use 2 or more"),
    ({"kind": "recall", "valid": "x"}, 'valid .x.: kind "recall" reads no file; leave the key out'),
    ({"kind": "recall", "recall": {"window": 1}}, "use 2 or more"),
    ({"kind": "maths"}, 'name: absent; kind "maths" needs the sets trained on, as laconic data list has them'),
    ({"kind": "maths", "name": ()}, 'name: absent; kind "maths" needs the sets trained on'),
    ({"kind": "maths", "name": "gsm8k", "path": "x"}, 'kind "maths" takes files by data.name; leave the key out'),
    ({"kind": "maths", "name": 5}, "should be a valid tuple"),
    ({"path": "x", "max_tokens": 0}, "greater than or equal to 1"),
    ({"path": "x", "longest": 3}, "Extra inputs are not permitted"),
    ({"path": "x", "digits": {"operations": 13}}, "less than or equal to 12"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED)
def test_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(said)


TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"segment": (100, 200), "tokens": 300}, r'segment \[100, 200\] with segments "random": give the mean length'),
    ({"segment": (100, 200), "tokens": 400, "segments": "fixed"}, "give lengths that sum to tokens 400"),
    ({"segment": 300, "tokens": 300}, "tokens 300: one segment of 300, which nothing reads; ask for more"),
    ({"segments": "fixed", "low": 5}, 'low: of segments "random" alone; leave it out'),
    ({"segments": "fixed", "high": 500}, 'high: of segments "random" alone; leave it out'),
    ({"segment": 100, "tokens": 250}, "tokens 250: no multiple of segment 100, the mean of drawn lengths"),
    ({"segment": 128, "low": 128}, "segment 128: not between low 128 and high None, as a mean is"),
    ({"segment": 128, "high": 100}, "segment 128: not between low None and high 100"),
    ({"low": 1}, "greater than or equal to 2"),
    ({"held": 0.5}, "less than 0.5"),
]


@pytest.mark.parametrize(("said", "message"), TEXTS)
def test_documents_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TextConfig.model_validate(said)


RECALLS: list[tuple[dict[str, Any], str]] = [
    ({"facts": (4, 2)}, r"facts \[4, 2\]: ascending numbers of facts"),
    ({"facts": ()}, r"facts \[\]: ascending numbers of facts"),
    ({"facts": (17,), "length": 64}, "facts 17: only 16 keys, and those of a document differ; give fewer facts"),
    ({"length": 4}, "length 4: 8 facts of 1 tokens do not go into 1 segments of it"),
    ({"length": 15, "two_tokens": True}, "length 15: 8 facts of 2 tokens do not go into 1 segments of it"),
    ({"keys": 17}, "less than or equal to 16"),
]


@pytest.mark.parametrize(("said", "message"), RECALLS)
def test_recall_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FactRecallConfig.model_validate(said)


@pytest.mark.parametrize("window", [1, 0, -3])
def test_a_window_needs_a_segment_that_reads(window: int) -> None:
    line = (
        f"window: {window} leaves no segment that reads a summary inside its own window, so nothing would learn to "
        "compress; use 2 or more"
    )
    for table in (TextConfig, FactRecallConfig):
        with pytest.raises(ValidationError) as error:
            table(window=window)
        assert line in str(error.value)


def test_windows_of_the_recall_task_are_all_segments_unless_said() -> None:
    assert FactRecallConfig().window_and_overlap == (2, 0)
    assert FactRecallConfig(num_segments=4).window_and_overlap == (5, 0)
    assert FactRecallConfig(num_segments=4, segments_per_window=3, segment_overlap=1).window_and_overlap == (3, 1)


def test_one_name_is_a_list_of_one() -> None:
    for name in ("gsm8k", ("gsm8k",)):
        assert DataConfig.model_validate({"kind": "maths", "name": name}).name == ("gsm8k",)
    for text in ('"gsm8k"', '["gsm8k"]'):
        assert DataConfig.model_validate_json(f'{{"kind": "maths", "name": {text}}}').name == ("gsm8k",)
    assert {"type": "string"} in DataConfig.model_json_schema()["properties"]["name"]["anyOf"]


def test_files_end_as_files_of_rows_do() -> None:
    assert all(map(is_row_file, ("a.jsonl", "b/a.parquet", "train.txt")))
    assert not any(map(is_row_file, ("gsm8k", "gsm8k-aug:valid", "a/b-v1.5")))


def test_defaults() -> None:
    assert DataConfig(path="rows.jsonl").answer_prompt == "The answer is:"
    assert DataConfig(source="digits", format="digits").digits.num_operations == 4
