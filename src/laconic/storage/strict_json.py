"""Read untrusted JSON within limits of size and depth, and write canonical JSON."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from laconic.errors import InputError, translate_os_errors
from laconic.storage.file_names import check_is_file

MAX_HEADER_BYTES = 100_000_000  # largest safetensors header or JSON file
MAX_JSON_DEPTH = 64
MAX_JSON_PARTS = 500_000  # commas and brackets; about a second of parsing, or 80,000 tensors in one file
MAX_INTEGER_DIGITS = 100
JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # never backtracks; an unclosed one ends the text
LONE_SURROGATES = re.compile("[\ud800-\udfff]")
Value = TypeVar("Value")


def to_canonical_json(value: object) -> str:
    """Return JSON with sorted keys and no spaces; raise `ValueError` for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def abbreviate(value: object) -> str:
    """Return a value as JSON of at most 60 characters, for messages."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of our own; see `parse_json`."""
    return parse_json(read_small_file(path), path.name)


def read_foreign_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file that another program wrote, as Python's `json` does.

    NaN and infinity are numbers, and the last of several equal keys counts; the limits of `parse_json` hold.
    """
    return parse_json(read_small_file(path), str(path), is_strict=False)


def read_small_file(path: Path) -> bytes:
    """Return the bytes of a file; raise InputError if it is missing or larger than a JSON file may be."""
    check_is_file(path)
    with translate_os_errors(path):
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise InputError(f"{path.name} has {path.stat().st_size:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
        return path.read_bytes()


def parse_json(data: bytes, label: str, *, is_strict: bool = True) -> dict[str, Any]:
    """Parse a JSON object from an untrusted source.

    Raises InputError if it is invalid or not an object, nested too deeply, too long, or has unpaired surrogates; with
    `is_strict` also for repeated keys, NaN, infinity and numbers out of range.
    """
    parts = sum(map(data.count, (b",", b"[", b"{")))
    if parts > MAX_JSON_PARTS:  # many may be text
        parts = sum(map(JSON_STRING.sub(b"", data).count, (b",", b"[", b"{")))
    if parts > MAX_JSON_PARTS:
        raise InputError(f"{label}: {parts:,} values; the limit is {MAX_JSON_PARTS:,}")
    try:
        value: object = (STRICT_DECODER if is_strict else FOREIGN_DECODER).decode(data.decode())
        if measure_depth(value) > MAX_JSON_DEPTH:
            raise ValueError(f"nested deeper than {MAX_JSON_DEPTH}")
        if b"\\u" in data and any(map(LONE_SURROGATES.search, iter_texts(value))):
            raise ValueError("a string holds an unpaired surrogate")
    except json.JSONDecodeError as error:
        raise InputError(f"{label}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{label}: byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise InputError(f"{label}: nested deeper than {MAX_JSON_DEPTH}") from None
    except ValueError as error:
        raise InputError(f"{label}: invalid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{label}:1:1: expected a JSON object")
    return cast(dict[str, Any], value)


def validate_json(kind: type[Value], value: object, label: str, remedy: str) -> Value:
    """Return a parsed value in a type, for example a dataclass; InputError with the first wrong key, and `remedy`."""
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))[:80]] if part)
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise InputError(f"{label}: {key}{reason}; {remedy}") from None


def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise `ValueError` for a repeated key."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"duplicate key {duplicate[:80]!r}; keep one of them")
    return result


def reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number; write null or a finite number")


def _parse_integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError(f"integer {text[:20]}… has {len(text):,} digits; the limit is {MAX_INTEGER_DIGITS}")
    return int(text)


def parse_finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is out of range")
    return value


def measure_depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    parts = cast(Iterable[Any], value.values() if isinstance(value, dict) else value)
    return 1 + max(map(measure_depth, parts), default=0)


def iter_texts(value: Any) -> Iterator[str]:
    """Yield the strings of a JSON value, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        values = cast(dict[str, Any], value).values() if isinstance(value, dict) else ()
        for part in chain(cast(Iterable[Any], value), values):
            yield from iter_texts(part)


STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=build_object,
    parse_constant=reject_constant,
    parse_int=_parse_integer,
    parse_float=parse_finite_float,
)
FOREIGN_DECODER = json.JSONDecoder(parse_int=_parse_integer)
