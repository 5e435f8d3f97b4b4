"""The [data] table: what cannot be meant together is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from laconic.data.settings import Data

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, 'path: absent; kind "jsonl" needs a file of training rows'),
    ({"kind": "digits", "format": "digits", "path": "x"}, 'kind "digits" reads no file; leave the key out'),
    ({"kind": "digits"}, '"digits" goes with "digits" alone'),
    ({"path": "x", "format": "digits"}, '"digits" goes with "digits" alone'),
    ({"path": "x", "format": "coconut"}, "takes every step; set chain"),
    ({"path": "x", "format": "icot"}, "takes every step; set chain"),
    ({"path": "x", "separator": "eos"}, 'of format "codi" alone, not'),
    ({"path": "x", "max_tokens": 0}, "greater than or equal to 1"),
    ({"path": "x", "longest": 3}, "Extra inputs are not permitted"),
    ({"path": "x", "digits": {"operations": 13}}, "less than or equal to 12"),
]


@pytest.mark.parametrize(("said", "message"), REFUSED)
def test_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Data.model_validate(said)


def test_defaults() -> None:
    assert Data(path="rows.jsonl").prompt == "The answer is:"
    assert Data(kind="digits", format="digits").digits.operations == 4
