"""One line of a JSONL file as an object, read strictly; what is wrong with it, and at which column."""

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from laconic.data.problems import make_excerpt
from laconic.storage.strict_json import MAX_JSON_DEPTH

MAX_LINE_BYTES = 10_000_000  # bytes of the longest line that is read
MAX_INTEGER = 2**63  # of marks; 2^53 would refuse products that published rows hold
HIGH_SURROGATE, LOW_SURROGATE = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# kind, what is said, the characters, how they are written escaped
FORBIDDEN_CHARACTERS = [
    ("lone surrogates", "half of a character (a lone surrogate)", re.compile("[\ud800-\udfff]"),
     re.compile(rf"{HIGH_SURROGATE}(?!{LOW_SURROGATE})|(?<!\\u[dD][89abAB]..){LOW_SURROGATE}")),
    ("NUL", "a NUL character", re.compile("\0"), re.compile(r"\\u0000")),
    ("bidi controls", "a mark that turns the order of a text", re.compile("[\u202a-\u202e\u2066-\u2069]"),
     re.compile(r"\\u20(?:2[a-eA-E]|6[6-9])")),
]  # fmt: skip
ANY_FORBIDDEN = re.compile("[" + "".join(there.pattern.strip("[]") for _, _, there, _ in FORBIDDEN_CHARACTERS) + "]")
ESCAPED_FORBIDDEN = re.compile(r"\\u(?:[dD][89a-fA-F]|0000|20(?:2[a-eA-E]|6[6-9]))")
JSON_SPACE = re.compile(r"[ \t\r\n]*")


class RowError(Exception):
    """What is wrong with a line: column (from 1), kind, text."""

    def __init__(self, column: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.column, self.kind, self.message = column, kind, message


def decode_line(line: bytes, first: bool, notes: Counter[str]) -> str:
    """The line as text, without byte-order mark and line end, which are noted. Raises `Fault`."""
    if first:
        check_file_type(line)
        if line.startswith(b"\xef\xbb\xbf"):
            notes["a byte-order mark at its start"] += 1
            line = line[3:]
    if len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES:
        raise RowError(
            1, "long lines", f"a line over {MAX_LINE_BYTES:,} bytes; write one object a line, or take this row out"
        )
    if line.endswith(b"\r\n"):
        notes["lines end with CR LF"] += 1
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        before = line[: error.start].decode()
        shown = make_excerpt(before[-40:], 1)
        cause = "ends inside a character" if error.reason == "unexpected end of data" else "is not UTF-8"
        text = f"byte {error.start + 1} of the line {cause}, after {shown!r}; save the file as UTF-8"
        raise RowError(len(before) + 1, "not UTF-8", text) from None


def check_file_type(line: bytes) -> None:
    """What is no JSONL by its first bytes."""
    if line.startswith(b"\x1f\x8b"):
        raise RowError(1, "compressed files", "compressed by gzip; unpack it: gzip -d < FILE > rows.jsonl")
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RowError(1, "not UTF-8", "UTF-16 by its first bytes; save the file as UTF-8")
    if line.startswith((b"PK\x03\x04", b"PAR1", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        raise RowError(
            1, "other files", "a zip, Parquet or compressed file by its first bytes; write one JSON object a line"
        )
    if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        raise RowError(
            1, "JSON arrays", "the file is one JSON array; write one object a line: jq -c '.[]' < FILE > rows.jsonl"
        )


def parse_row(text: str) -> dict[str, Any]:
    """The object of a line: no key twice, no NaN, integers to 2^63, depth 64, whole characters. Raises `Fault`."""
    try:
        row: Any = STRICT_DECODER.decode(text)
    except json.JSONDecodeError as error:
        say = "one object stands on each line" if error.msg == "Extra data" else "write one whole JSON object a line"
        column = error.pos + 1
        raise RowError(column, "bad JSON", f"not JSON: {error.msg}: {make_excerpt(text, column)}; {say}") from None
    except RecursionError:
        raise RowError(
            1, "deep JSON", f"nested deeper than {MAX_JSON_DEPTH}: {make_excerpt(text)}; write plain fields"
        ) from None
    except ValueError as error:
        column = locate_error(text)
        raise RowError(column, "bad JSON", f"not strict JSON: {error}: {make_excerpt(text, column)}") from None
    if not isinstance(row, dict):
        raise RowError(1, "other JSON", f"no object: {make_excerpt(text)}; write one JSON object a line")
    if is_too_deep(text):
        raise RowError(1, "deep JSON", f"nested deeper than {MAX_JSON_DEPTH}: {make_excerpt(text)}; write plain fields")
    if "\\u" in text or not text.isascii():
        check_characters(text)
    return row


def check_characters(text: str) -> None:
    """Halves of characters, NUL, and marks that turn the order of a text, written out or escaped."""
    strings = join_strings(text) if "\\u" in text and ESCAPED_FORBIDDEN.search(text) else text
    if not ANY_FORBIDDEN.search(strings):
        return
    for kind, said, there, escaped in FORBIDDEN_CHARACTERS:
        if there.search(strings):
            found = there.search(text) or escaped.search(text)
            column = found.start() + 1 if found else 1
            raise RowError(
                column, kind, f"{said}: {make_excerpt(text, column)}; take it out, or write the character meant"
            )


def join_strings(text: str) -> str:
    """All strings of a line, decoded, after one another."""
    found: list[str] = []
    for part in re.finditer(r'"(?:[^"\\]|\\.)*"', text):
        found.append(json.loads(part.group()))
    return "\n".join(found)


def is_too_deep(text: str) -> bool:
    """Whether brackets nest deeper than is read; strings aside, which are looked at only where it may be so."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return False
    depth = deepest = 0
    for c in re.sub(r'"(?:[^"\\]|\\.)*"', "", text):
        depth += (c in "[{") - (c in "]}")
        deepest = max(deepest, depth)
    return deepest > MAX_JSON_DEPTH


def locate_fields(text: str) -> list[tuple[str, int, int]]:
    """The members of the object in a line: key, its column, its value's column; up to the first that is faulty."""
    found: list[tuple[str, int, int]] = []
    at = _skip(text, 0) + 1
    try:
        while text[_skip(text, at)] == '"':
            start = _skip(text, at)
            key, end = PLAIN_DECODER.raw_decode(text, start)
            value = _skip(text, _skip(text, end) + 1)
            found.append((key, start + 1, value + 1))
            at = _skip(text, STRICT_DECODER.raw_decode(text, value)[1]) + 1
    except (ValueError, IndexError, RecursionError):
        pass
    return found


def _skip(text: str, at: int) -> int:
    found = JSON_SPACE.match(text, at)
    return found.end() if found else at


def locate_field(text: str, key: str) -> tuple[int, int]:
    """The columns of a key and of its value, of the last so named."""
    return next(((start, value) for name, start, value in reversed(locate_fields(text)) if name == key), (1, 1))


def locate_error(text: str) -> int:
    """The column of the first member that is not strict JSON: of a key that stands twice, or of a value."""
    seen: set[str] = set()
    found = locate_fields(text)
    for key, start, _ in found:
        if key in seen:
            return start
        seen.add(key)
    return found[-1][2] if found else 1


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in [k for k, _ in pairs[:i]])
        raise ValueError(f"key {twice[:60]!r} stands twice; keep one")
    return found


def _constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number; leave the row out")


def _integer(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= MAX_INTEGER:
        raise ValueError(f"integer {text[:20]} is beyond 2^63; put it in quotes")
    return int(text)


def _number(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]} is beyond the range of numbers; put it in quotes")
    return float(text)


PLAIN_DECODER = json.JSONDecoder()
STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_constant=_constant, parse_int=_integer, parse_float=_number
)
