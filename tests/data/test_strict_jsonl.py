"""Strict JSONL: fifty invalid files, each refused with line and remedy (R8); any bytes (S5)."""

import bz2
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.config.data import DataConfig
from laconic.data.reasoning.read_examples import ACCEPTED_FIELDS, read_examples
from laconic.data.strict_jsonl import EXCERPT_LENGTH, MAX_LINE_BYTES, MAX_REPORTED, ROWS_PER_SKIP, RowError, parse_row
from laconic.errors import InputError
from tests.trust.limits import LIMITS

GOOD = b'{"question": "2 and 2?", "steps": ["<<2+2=4>>"], "answer": "4"}\n'
CONFIG = DataConfig(path="rows.jsonl")


def row(**fields: Any) -> bytes:
    return json.dumps({"question": "2 and 2?", "steps": ["<<2+2=4>>"], "answer": "4", **fields}).encode() + b"\n"


def less(*keys: str) -> bytes:
    return json.dumps({k: v for k, v in json.loads(GOOD).items() if k not in keys}).encode() + b"\n"


def raw(old: bytes, new: bytes) -> bytes:
    assert old in GOOD
    return GOOD.replace(old, new)


# Content of the file -> line in the message, and a part of it.
BAD: dict[str, tuple[bytes, str, str]] = {
    "an object cut short": (GOOD + GOOD[:40], "2", "invalid JSON at character 36: Unterminated string"),
    "a line that is not JSON": (GOOD + b"question,steps,answer\n", "2", "invalid JSON at character 1: Expecting value"),
    "single quotes": (b"{'question': 'a'}\n", "1", "invalid JSON at character 2: Expecting property name"),
    "a trailing comma": (raw(b'"4"}', b'"4",}'), "1", "invalid JSON"),
    "two objects on a line": (GOOD[:-1] + b" " + GOOD, "1", "Extra data"),
    "one object over many lines": (b'{\n  "question": "a"\n}\n', "1", "write one JSON object per line"),
    "a line end inside a text": (raw(b"2 and", b"2\nand"), "1", "invalid JSON at character 14: Unterminated string"),
    "a tab inside a text": (raw(b"2 and", b"2\tand"), "1", "invalid JSON at character 16: Invalid control character"),
    "a bad escape": (raw(b"2 and", b"2\\xand"), "1", "invalid JSON at character 16: Invalid \\escape"),
    "Latin-1": (raw(b"2 and", b"zzz\xe9"), "1", "byte 18 of the line is not UTF-8"),
    "UTF-8 cut short": (raw(b'"4"}\n', b'"\xe2\x82'), "1", "byte 61 of the line is not UTF-8"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "1", "UTF-16 by its first bytes"),
    "NUL as it is": (raw(b"2 and", b"2\x00and"), "1", "invalid JSON at character 16: Invalid control character"),
    "half a character": (raw(b"2 and", b"2\\ud83dand"), "1", "question: has lone surrogates; remove"),
    "halves the wrong way round": (raw(b"2 and", b"\\ude00\\ud83d"), "1", "has lone surrogates"),
    "half of a character after whole ones": (raw(b"2 and", b"\\ud83d\\ude00\\ud83d"), "1", "has lone surrogates"),
    "the other half alone": (raw(b"2 and", b"\\ud83d\\ude00 \\ude00"), "1", "or write the intended character"),
    "a key twice": (raw(b'"4"', b'"4", "answer": "5"'), "1", "duplicate key 'answer'"),
    "a key twice inside a mark": (raw(b'"4"', b'"4", "m": {"a": 1, "a": 2}'), "1", "duplicate key 'a'"),
    "NaN": (raw(b'"4"', b"NaN"), "1", "NaN is not a JSON number"),
    "infinity": (raw(b'"4"', b'"4", "m": [1, -Infinity]'), "1", "-Infinity is not a JSON number"),
    "a number too large": (raw(b'"4"', b'"4", "m": 1e999'), "1", "1e999 is out of range"),
    "brackets without end": (b'{"question": ' + b"[" * 100_000 + b"\n", "1", "nested deeper than 64"),
    "brackets too deep": (raw(b'"4"', b'"4", "m": ' + b"[" * 70 + b"]" * 70), "1", "; use plain fields"),
    "a list for an object": (GOOD + b'["question", "answer"]\n', "2", "not an object"),
    "a text for an object": (b'"question"\n', "1", 'not an object: "question"'),
    "no question": (less("question"), "1", "no question; the fields are steps, answer: {"),
    "no answer": (GOOD + less("answer"), "2", "no field answer: {"),
    "a misspelt answer": (GOOD + raw(b"answer", b"answerr"), "2", "no field answer; answerr must be called answer: {"),
    "steps that stop": (GOOD + less("steps"), "2", '"answer": "4"}; a row before has it; give'),
    "steps that begin": (less("steps") + GOOD, "2", "steps: has a chain, but the first row has none"),
    "null": (row(answer=None), "1", "answer: not a string: null; expected"),
    "a boolean for a text": (row(answer=True), "1", "answer: not a string: true; put"),
    "a number for a text": (row(question=5), "1", "question: not a string: 5; put"),
    "a type that changes": (GOOD + row(steps="<<2+2=4>>"), "2", '; write ["<<3+4=7>>"], or [] for none'),
    "a number among steps": (row(steps=["a", 4]), "1", 'steps: not a list of non-empty strings: ["a", 4]'),
    "an empty question": (row(question="  "), "1", "question: empty: "),
    "an empty step": (row(steps=["a", ""]), "1", 'steps: not a list of non-empty strings: ["a", ""]'),
    "an id twice": (row(id="x") + row(id="x"), "2", "duplicate id 'x'"),
    "messages": (b'{"messages": []}\n', "1", "messages: expected a list of messages such as"),
    "prompts": (b'{"prompt": "a", "completion": 3}\n', "1", "both strings, or both lists of messages"),
    "another UTF-16": (GOOD.decode().encode("utf-16-be").join((b"\xfe\xff", b"\x00\n")), "1", "UTF-16"),
    "one JSON array": (
        b"[" + GOOD[:-1] + b",\n" + GOOD + b"]\n",
        "1",
        "the file is one JSON array",
    ),
    "an object on several lines": (
        b'{\n "question": "q"\n}\n',
        "1",
        "an object on several lines; write",
    ),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab", "1", "compressed with gzip; unpack it"),
    "bzip2": (bz2.compress(GOOD), "1", "compressed with bzip2; unpack it"),
    "xz": (lzma.compress(GOOD), "1", "compressed with xz; unpack it"),
    "Parquet": (b"PAR1\x15\x04\x15", "1", "Parquet by its first bytes; give the file a name that ends in .parquet"),
    "a line over 10 MB": (
        GOOD + row(question="a" * (MAX_LINE_BYTES + 5)) + GOOD,
        "2",
        "000 bytes; write one JSON object per line, or remove this row",
    ),
    "an empty file": (b"", "", "contains no row; expected messages, or prompt and completion, or instruction"),
    "only blank lines": (b"\n\n \n", "", "and optionally document (a string), one object per line"),
}


@pytest.mark.parametrize("name", BAD)
def test_read_examples_refuses_invalid_files(name: str, tmp_path: Path) -> None:
    data, place, message = BAD[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_examples(path, CONFIG)
    first = str(caught.value).split("\n")[0]
    assert first.startswith(f"rows.jsonl:{place}: " if place else "rows.jsonl: "), first
    assert message in first
    assert caught.value.exit_code == 66
    assert first.isprintable()
    assert len(first) < 400


def test_parse_row_accepts_escaped_backslashes(tmp_path: Path) -> None:
    """An escaped backslash before u202e is plain text, and surrogate pairs are whole characters."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(raw(b"2 and", rb"a\\u202e \\ud83d \\u0000 \ud83d\ude00 \u2019"))
    assert read_examples(path, CONFIG).examples[0].question == "a\\u202e \\ud83d \\u0000 \U0001f600 \u2019 2?"


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63)])
def test_parse_row_accepts_integers_of_64_bits(number: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(row(n=number, answer=number))
    example = read_examples(path, CONFIG).examples[0]
    assert (example.metadata["n"], example.answer) == (number, str(number))


def test_read_examples_of_another_file_format_reports_one_problem(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes((GOOD * 3).decode().encode("utf-16"))
    with pytest.raises(InputError) as caught:
        read_examples(tmp_path / "rows.jsonl", CONFIG)
    assert str(caught.value) == "rows.jsonl:1: UTF-16 by its first bytes; save the file as UTF-8"


def test_read_examples_message_format(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "Tom has?", "steps": [], "answer": [5]}\n{"question": "日本 😀?", answer}\n')
    with pytest.raises(InputError) as caught:
        read_examples(path, CONFIG)
    assert str(caught.value).split("\n") == [
        f"train.jsonl:1: answer: not a string: [5]; {ACCEPTED_FIELDS}",
        "train.jsonl:2: invalid JSON at character 23: Expecting property name enclosed in double quotes: "
        '{"question": "日本 😀?", answer}; write one JSON object per line',
    ]


def test_format_problems_counts_the_rest_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + row(answer=[]) * 25 + b"no\n" * 5 + GOOD)
    with pytest.raises(InputError) as caught:
        read_examples(path, CONFIG)
    lines = str(caught.value).split("\n")
    assert [line.split(":")[1] for line in lines[:20]] == [str(n) for n in range(2, 22)]
    assert lines[20:] == ["and 10 more: 5 wrong types, 5 bad JSON"]


def test_read_examples_skips_at_most_one_row_in_a_thousand(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 1999 + b"no\n")
    config = CONFIG.model_copy(update={"on_invalid_row": "skip"})
    read = read_examples(path, config)
    assert len(read.examples) == 1999
    assert read.notes[-1].startswith("skipped: rows.jsonl:2000: invalid JSON")
    path.write_bytes(GOOD * 998 + b"no\n")
    with pytest.raises(InputError, match=r"1 of 999 rows are invalid; at most 0\.1 % may be skipped"):
        read_examples(path, config)


def test_limits_match_limits_toml() -> None:
    limits = {
        "data_line": MAX_LINE_BYTES,
        "data_shown": MAX_REPORTED,
        "data_excerpt": EXCERPT_LENGTH,
        "data_skipped": ROWS_PER_SKIP,
    }
    assert {name: LIMITS[name] for name in limits} == limits


def mutated(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    """Replace bytes at random places."""
    for share, length, new in changes:
        at = int(share * len(data))
        data = data[:at] + new + data[at + length :]
    return data


PIECES = st.sampled_from(
    [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u", b"\\ud800", b"\x00", b"\xff", b"\xe2\x80", b"\n", b"\r",
     b"NaN", b"1e999", b"null", b"9" * 25, b"\xef\xbb\xbf", "\u202e".encode(), b"[" * 80, b"true", b'"id": "a"', b" "]
)  # fmt: skip
FILES: list[Callable[[], st.SearchStrategy[bytes]]] = [
    lambda: st.binary(max_size=200),
    lambda: st.lists(PIECES, max_size=30).map(b"".join),
    lambda: st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6), PIECES), min_size=1, max_size=4).map(
        lambda changes: mutated(GOOD + row(id="b", m=[1, {"x": None}]) + GOOD, changes)
    ),
]


@pytest.mark.medium
@settings(max_examples=200)
@given(st.one_of(*(make() for make in FILES)))
def test_read_examples_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Any bytes give examples or a typed error."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    path.write_bytes(data)
    error = ""
    try:
        read = read_examples(path, CONFIG).examples
    except InputError as caught:
        read, error = (), str(caught)
    assert all(line.isprintable() for line in error.split("\n"))
    assert all(e.question.strip() and e.answer.strip() and all(e.steps) for e in read)


def test_parse_row_finds_a_duplicate_among_many_keys() -> None:
    """A comparison of every key with every other one would take many minutes."""
    text = "{" + ", ".join(f'"{n}": 1' for n in range(50_000)) + ', "7": 2}'
    with pytest.raises(RowError, match="duplicate key '7'"):
        parse_row(text)
