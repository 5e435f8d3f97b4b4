"""Lazy reading of texts from JSONL: names, and the first problem with line and column."""

import pytest

from laconic.data.documents.load import iter_texts
from laconic.errors import InputError


def test_iter_texts() -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "one"}\r\n',
        b'{"id": 7, "text": "t\\u00e9", "more": [1]}\n',
        b'{"id": "x", "text": "3"}',
    ]
    assert list(iter_texts([*lines, b"\n"], "a.jsonl")) == [("a.jsonl:1", "one"), ("7", "té"), ("x", "3")]


def test_iter_texts_is_lazy() -> None:
    texts = iter_texts(iter([b'{"text": "one"}\n', b"bad"]), "a.jsonl")
    assert next(texts) == ("a.jsonl:1", "one")
    with pytest.raises(InputError, match=r"^a\.jsonl:2: invalid JSON"):
        next(texts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[]", "2: not an object: "),
        (b'{"text": ""}', "2: text: empty: "),
        (b'{"text": " "}', "2: text: empty: "),
        (b'{"id": "a", "text": null}', "2: text: not a string: "),
        (b'{"words": "a"}', "2: no field text: "),
        (b'{"text": "a", "text": "b"}', "2: invalid JSON: duplicate key 'text'"),
        (b'{"text": "\xff"}', "2: byte 11 of the line is not UTF-8"),
        (b"\n{}", "3: no field text: {}"),
    ],
)
def test_iter_texts_refuses_invalid_rows(line: bytes, message: str) -> None:
    lines = [b'{"text": "one"}\n', *(part + b"\n" for part in line.split(b"\n"))]
    with pytest.raises(InputError, match=message):
        list(iter_texts(lines, "a.jsonl"))
