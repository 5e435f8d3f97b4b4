"""The [data] table: what cannot be meant together is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from laconic.data.settings import Data, is_file

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, 'path: absent; kind "jsonl" needs a file of training rows'),
    ({"kind": "digits", "format": "digits", "path": "x"}, 'kind "digits" reads no file; leave the key out'),
    ({"kind": "digits"}, '"digits" goes with "digits" alone'),
    ({"path": "x", "format": "digits"}, '"digits" goes with "digits" alone'),
    ({"path": "x", "format": "coconut"}, "takes every step; set chain"),
    ({"path": "x", "format": "icot"}, "takes every step; set chain"),
    ({"path": "x", "separator": "eos"}, 'of format "codi" alone, not'),
    ({"path": "x", "name": "gsm8k"}, 'name: of kind "maths" alone, not .jsonl.; set data.kind = "maths"'),
    ({"path": "x", "root": "data"}, 'root: of kind "maths" alone, not .jsonl.; set data.kind = "maths"'),
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
        Data.model_validate(said)


def test_one_name_is_a_list_of_one() -> None:
    for name in ("gsm8k", ("gsm8k",)):
        assert Data.model_validate({"kind": "maths", "name": name}).name == ("gsm8k",)
    for text in ('"gsm8k"', '["gsm8k"]'):
        assert Data.model_validate_json(f'{{"kind": "maths", "name": {text}}}').name == ("gsm8k",)
    assert {"type": "string"} in Data.model_json_schema()["properties"]["name"]["anyOf"]


def test_files_end_as_files_of_rows_do() -> None:
    assert all(map(is_file, ("a.jsonl", "b/a.parquet", "train.txt")))
    assert not any(map(is_file, ("gsm8k", "gsm8k-aug:valid", "a/b-v1.5")))


def test_defaults() -> None:
    assert Data(path="rows.jsonl").prompt == "The answer is:"
    assert Data(kind="digits", format="digits").digits.operations == 4
