"""Strict JSONL reader: one JSON object per line, with the line and column of every error.

Rows of Parquet files and of Hub data sets pass through the same functions, so that they are checked and reported alike.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from laconic.data.parquet_and_hub import read_parquet
from laconic.errors import InputError, translate_os_errors
from laconic.storage.strict_json import MAX_JSON_DEPTH, build_object, parse_finite_float, reject_constant

MAX_LINE_BYTES = 10_000_000
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1  # ids have up to 64 bits, and products in published rows more than 53
MAX_INTEGER_DIGITS = 20
MAX_REPORTED = 20  # problems listed one by one; the rest are counted by kind
EXCERPT_LENGTH = 80
ROWS_PER_SKIP = 1000  # `on_invalid_row = "skip"` may drop one row in this many
ONE_OBJECT = "write one JSON object per line"
LONE_SURROGATES = re.compile("[\ud800-\udfff]")
# Lone surrogates, NUL and bidirectional control characters.
FORBIDDEN_CHARACTERS = re.compile("[\0\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
# Any of them, any escaped surrogate, and text that only looks like an escape: most lines have none.
SUSPICIOUS_TEXT = re.compile(f"{FORBIDDEN_CHARACTERS.pattern}" r"|\\u(?:0000|[dD][89a-fA-F]|20(?:2[a-eA-E]|6[6-9]))")
JSON_SPACE = re.compile(r"[ \t\r\n]*")
COMPRESSED_FILES = {  # by their first bytes
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip",
}  # fmt: skip
WRONG_FILE_KINDS = ("compressed files", "other files", "JSON arrays")  # of which no other line is read

T = TypeVar("T")
RowParser = Callable[[str], dict[str, Any]]  # the object on a line; raises RowError
RowConverter = Callable[[dict[str, Any], str], T]  # (row, its name) -> value; raises RowError


class RowError(Exception):
    """A row that cannot be used: kind of problem (those after the first 20 are counted by it), problem and remedy.

    `field` is the field that is wrong, `column` (from 1, in characters) the place if it is not the field's value.
    """

    def __init__(
        self, kind: str, problem: str, remedy: str = "", *, field: str | None = None, column: int | None = None
    ) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.remedy, self.field, self.column = kind, problem, remedy, field, column


class RowProblem(NamedTuple):
    """A reported problem: line and column from 1 (0 if the message names the place), kind, and message."""

    line: int
    column: int
    kind: str
    message: str


class NumberedRow(NamedTuple):
    """A parsed row: its number from 1, its JSON text, and the object."""

    number: int
    text: str
    row: dict[str, Any]


# --- reading files


def check_data_file(file: Path) -> None:
    if file.is_dir():
        hint = 'in data.name a data set of several files, FOLDER/NAME (of questions: with data.source = "catalog")'
        raise InputError(f"{file} is a folder; give a file, or {hint}")
    if not file.is_file():
        raise InputError(f"no file {file}; paths are relative to a recipe's file, else to the current folder")


def read_rows(
    path: str | Path, convert: RowConverter[T], max_rows: int | None = None, parse: RowParser | None = None
) -> tuple[list[T], list[str]]:
    """Read up to `max_rows` rows of a JSONL or Parquet (`.parquet`) file, with notes for the user.

    `convert` is called with each row and its name (`file:line`), `parse` with each line of JSONL.

    Raises:
        InputError: If the file does not exist, has no rows, or has invalid ones; the first 20 problems are listed.
    """
    file = Path(path)
    check_data_file(file)
    if file.suffix.lower() == ".parquet":
        return convert_rows(file.name, number_table_rows(read_parquet(file).rows), convert, max_rows, is_table=True), []
    with translate_os_errors(file), file.open("rb") as stream:
        return read_row_stream(stream, file.name, convert, max_rows, parse)


def read_row_stream(
    stream: BinaryIO, name: str, convert: RowConverter[T], max_rows: int | None = None, parse: RowParser | None = None
) -> tuple[list[T], list[str]]:
    """Read the rows of an open JSONL file as `read_rows` does; `name` is that of messages."""
    notes: Counter[str] = Counter()
    rows = convert_rows(name, parse_lines(iter_lines(stream), notes, parse), convert, max_rows)
    return rows, format_notes(name, notes)


def iter_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines; one over the size limit comes in several parts, so that memory stays bounded."""
    return iter(lambda: stream.readline(MAX_LINE_BYTES + 2), b"")


def parse_lines(
    lines: Iterable[bytes], notes: Counter[str], parse: RowParser | None = None
) -> Iterator[NumberedRow | RowProblem]:
    """Yield the row or the problem of each line, and count accepted irregularities in `notes`; see `read_rows`."""
    number, is_continuation = 1, False
    for line in lines:
        if not is_continuation:
            text = ""
            try:
                text = decode_line(line, is_first=number == 1, notes=notes)
                if text.strip():
                    yield NumberedRow(number, text, (parse or parse_row)(text))
                else:
                    notes["blank lines, which are skipped"] += 1
            except RowError as error:
                yield locate_problem(error, NumberedRow(number, text, {}))
                if error.kind in WRONG_FILE_KINDS:
                    return
        # Of a line over the limit, only the first part is reported.
        is_continuation = not line.endswith(b"\n")
        number += not is_continuation


def number_table_rows(rows: Iterable[dict[str, Any]]) -> Iterator[NumberedRow]:
    """Yield the rows of a table with their numbers, and as JSON text in which errors are located."""
    for number, row in enumerate(rows, 1):
        yield NumberedRow(number, json.dumps(row, ensure_ascii=False, default=str), row)


def convert_rows(
    name: str,
    rows: Iterable[NumberedRow | RowProblem],
    convert: RowConverter[T],
    max_rows: int | None = None,
    *,
    is_table: bool = False,
) -> list[T]:
    """Convert rows and raise `InputError` with all problems if there are any."""
    converted: list[T] = []
    problems: list[RowProblem] = []
    for result in convert_each(name, rows, convert, is_table=is_table):
        if isinstance(result, RowProblem):
            problems.append(result)
        else:
            converted.append(result)
        if max_rows is not None and len(converted) >= max_rows:
            break
    if problems:
        raise InputError(format_problems(problems, name))
    if not converted:
        raise InputError(f"{name}: contains no row; {ONE_OBJECT}")
    return converted


def convert_each(
    name: str, rows: Iterable[NumberedRow | RowProblem], convert: RowConverter[T], *, is_table: bool = False
) -> Iterator[T | RowProblem]:
    """Yield what each row becomes, or its problem."""
    for row in rows:
        if isinstance(row, RowProblem):
            yield row
            continue
        try:
            value = convert(row.row, f"{name}:{row.number}")
        except RowError as error:
            yield locate_problem(error, row, name if is_table else None)
        else:
            yield value


def require_text(row: Mapping[str, Any], field: str, accepted: str) -> str:
    """Return a field that must be a non-empty string. Raises `RowError`."""
    if field not in row:
        raise RowError("missing fields", f"{field}: no such field", accepted)
    value = row[field]
    if not isinstance(value, str):
        raise RowError("wrong types", "not a string", f"put it in quotes; {accepted}", field=field)
    if not value.strip():
        raise RowError("empty fields", "empty", "expected a non-empty string", field=field)
    return value


# --- parsing a line


def decode_line(line: bytes, is_first: bool, notes: Counter[str]) -> str:
    """Decode a line without its byte-order mark and line end, both of which are noted. Raises `RowError`."""
    if is_first:
        check_file_type(line)
        if line.startswith(b"\xef\xbb\xbf"):
            notes["a byte-order mark at the start"] += 1
            line = line[3:]
    if len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES:
        raise RowError("long lines", f"a line over {MAX_LINE_BYTES:,} bytes", f"{ONE_OBJECT}, or remove this row")
    if line.endswith(b"\r\n"):
        notes["lines end with CR LF"] += 1
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode()) + 1
        raise RowError(
            "not UTF-8", f"byte {error.start + 1} of the line is not UTF-8", "save as UTF-8", column=column
        ) from None


def find_compression(start: bytes) -> str | None:
    return next((program for magic, program in COMPRESSED_FILES.items() if start.startswith(magic)), None)


def check_file_type(line: bytes) -> None:
    if (program := find_compression(line)) is not None:
        raise RowError("compressed files", f"compressed with {program}", "unpack it")
    if line.startswith(b"PAR1"):
        raise RowError("other files", "Parquet by its first bytes", "give the file a name that ends in .parquet")
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RowError("other files", "UTF-16 by its first bytes", "save the file as UTF-8")
    if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        raise RowError("JSON arrays", "the file is one JSON array", f"{ONE_OBJECT}: jq -c '.[]' < FILE > rows.jsonl")


def parse_row(text: str, forbidden: re.Pattern[str] = FORBIDDEN_CHARACTERS) -> dict[str, Any]:
    """Parse the object on a line strictly.

    Refused are duplicate keys, NaN and infinities, integers of more than 64 bits, nesting deeper than 64, and
    `forbidden` characters. Raises `RowError`.
    """
    try:
        row: Any = STRICT_DECODER.decode(text)
        is_too_deep = text.count("[") + text.count("{") > MAX_JSON_DEPTH and measure_depth(row) > MAX_JSON_DEPTH
    except json.JSONDecodeError as error:
        raise RowError("bad JSON", f"invalid JSON: {error.msg}", ONE_OBJECT, column=error.pos + 1) from None
    except RecursionError:
        row, is_too_deep = {}, True
    except ValueError as error:  # of a key or number, without its place
        column = locate_values(text)[-1][1]
        raise RowError("bad JSON", f"invalid JSON: {error}", column=column) from None
    if is_too_deep:
        raise RowError("deep JSON", f"nested deeper than {MAX_JSON_DEPTH}", "use plain fields")
    if not isinstance(row, dict):
        raise RowError("other JSON", "not an object", ONE_OBJECT)
    if ("\\u" in text or not text.isascii()) and SUSPICIOUS_TEXT.search(text):
        check_characters(row, forbidden)
    return row


def measure_depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(measure_depth, value.values() if isinstance(value, dict) else value), default=0)


def check_characters(row: dict[str, Any], forbidden: re.Pattern[str]) -> None:
    for key, value in row.items():
        character = next((match[0] for text in iter_texts([key, value]) if (match := forbidden.search(text))), None)
        if character is not None:
            is_half, is_nul = LONE_SURROGATES.match(character), character == "\0"
            kind = "lone surrogates" if is_half else "NUL characters" if is_nul else "bidirectional control characters"
            raise RowError(kind, f"has {kind}", "remove them, or write the intended characters", field=key)


def iter_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in chain(value, value.values()) if isinstance(value, dict) else value:
            yield from iter_texts(part)


def _parse_integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS or not MIN_INTEGER <= int(text) <= MAX_INTEGER:
        raise ValueError(f"integer {text[:MAX_INTEGER_DIGITS]} has more than 64 bits; put it in quotes")
    return int(text)


PLAIN_DECODER = json.JSONDecoder()
STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=build_object,
    parse_constant=reject_constant,
    parse_int=_parse_integer,
    parse_float=parse_finite_float,
)


# --- locating and reporting problems


def locate_values(text: str) -> list[tuple[str, int]]:
    """Return each key of the object on a line with the column of its value, up to the first repeated or invalid one."""
    values, seen = list[tuple[str, int]](), set[str]()
    position = skip_space(text, 0) + 1
    try:
        while text[start := skip_space(text, position)] == '"':
            key, end = PLAIN_DECODER.raw_decode(text, start)
            value = skip_space(text, skip_space(text, end) + 1)
            values.append((key, value + 1))
            if key in seen:
                break
            seen.add(key)
            position = skip_space(text, STRICT_DECODER.raw_decode(text, value)[1]) + 1
    except (ValueError, IndexError, RecursionError):
        pass
    return values or [("", 1)]


def skip_space(text: str, position: int) -> int:
    match = JSON_SPACE.match(text, position)
    return match.end() if match else position


def locate_problem(error: RowError, row: NumberedRow, table: str | None = None) -> RowProblem:
    """Return the problem of a row: at its line and column, or in a table of this name at its row number."""
    column = error.column or next((column for key, column in locate_values(row.text) if key == error.field), 1)
    field = "" if error.field is None else make_excerpt(error.field)
    excerpt, remedy = f": {make_excerpt(row.text, column)}", f"; {error.remedy}"
    message = error.problem + (excerpt if row.text else "") + (remedy if error.remedy else "")
    if table is not None:
        return RowProblem(0, 0, error.kind, f"{table}:row {row.number}{field and f':{field}'}: {message}")
    return RowProblem(row.number, column, error.kind, f"{field and f'{field}: '}{message}")


def format_problems(problems: Sequence[RowProblem], name: str) -> str:
    """Format the first 20 problems, one per line, and count the others by kind."""
    lines = [f"{name}:{p.line}:{p.column}: {p.message}" if p.line else p.message for p in problems[:MAX_REPORTED]]
    rest = Counter(p.kind for p in problems[MAX_REPORTED:])
    if rest:
        lines.append(f"and {rest.total():,} more: " + ", ".join(f"{n:,} {kind}" for kind, n in rest.most_common()))
    return "\n".join(lines)


def format_notes(name: str, notes: Counter[str]) -> list[str]:
    return [f"{name}: {note}" + (f" ({n:,} lines)" if n > 1 else "") for note, n in notes.items()]


def is_within_skip_limit(num_invalid: int, num_rows: int) -> bool:
    """Return whether few enough rows are invalid for `on_invalid_row = "skip"` to drop them."""
    return num_invalid * ROWS_PER_SKIP <= num_rows


def make_excerpt(text: str, column: int = 1) -> str:
    """Return at most 80 characters of a line around a column, with control characters escaped."""
    start = max(0, min(column - 1 - EXCERPT_LENGTH // 4, len(text) - EXCERPT_LENGTH))
    part = ("…" if start else "") + "".join(map(escape_character, text[start : start + EXCERPT_LENGTH]))
    is_complete = len(part) <= EXCERPT_LENGTH and start + EXCERPT_LENGTH >= len(text)
    return part if is_complete else part[: EXCERPT_LENGTH - 1] + "…"


def escape_character(c: str) -> str:
    """Return a character as a terminal can show it; controls, surrogates and unusual spaces as escapes."""
    if c == " " or unicodedata.category(c)[0] not in "CZ":
        return c
    return f"\\u{ord(c):04x}" if ord(c) < 0x10000 else f"\\U{ord(c):08x}"
