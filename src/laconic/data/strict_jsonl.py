"""Strict JSONL reader: one JSON object per line, with the line and field of every error.

Rows of Parquet files and of Hub data sets pass through the same functions, so that they are checked and reported alike.
"""

import codecs
import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from laconic.data.parquet_and_hub import read_parquet
from laconic.errors import InputError, translate_os_errors
from laconic.storage.strict_json import LONE_SURROGATES, MAX_JSON_DEPTH, STRICT_DECODER, iter_texts, measure_depth

MAX_LINE_BYTES = 10_000_000
MAX_REPORTED = 20  # problems listed one by one; the rest are counted by kind
EXCERPT_LENGTH = 80
ROWS_PER_SKIP = 1000  # `on_invalid_row = "skip"` may drop one row in this many
ONE_OBJECT = "write one JSON object per line"
WRONG_FILE_TYPE = "other files"  # kind of a problem after which no line is read
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
COMPRESSED_FILES = {  # by their first bytes
    b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip",
}  # fmt: skip

T = TypeVar("T")
RowParser = Callable[[str], dict[str, Any]]  # the object on a line; raises RowError
RowConverter = Callable[[dict[str, Any], str], T]  # (row, its name) -> value; raises RowError
IsLast = Callable[[T], bool]  # whether a converted row is the last one to read


class RowError(Exception):
    """A row that cannot be used, with the problem, the remedy and the field that is wrong.

    After the first 20 problems, only the number of each `kind` is reported.
    """

    def __init__(self, kind: str, problem: str, remedy: str = "", *, field: str | None = None) -> None:
        super().__init__(problem)
        self.kind, self.problem, self.remedy, self.field = kind, problem, remedy, field

    def describe(self, row: Mapping[str, Any] | None = None) -> str:
        """Return field, problem, the beginning of the field's value or else of the row, and the remedy."""
        field = "" if self.field is None else f"{make_excerpt(self.field)}: "
        value = row if row is None or self.field is None else row.get(self.field, row)
        text = json.dumps(value, ensure_ascii=False, default=str)
        excerpt = "" if row is None else f": {make_excerpt(text)}"
        return f"{field}{self.problem}{excerpt}" + (f"; {self.remedy}" if self.remedy else "")


class RowProblem(NamedTuple):
    """A reported problem: line or row of a table, from 1 (0 if the message names the place), kind, and message."""

    line: int
    kind: str
    message: str


NumberedRow = tuple[int, dict[str, Any]]  # with its line, or its place in a table, from 1


# --- reading files


def check_data_file(file: Path) -> None:
    if file.is_dir():
        hint = 'in data.name a data set of several files, FOLDER/NAME (of questions: with data.source = "catalog")'
        raise InputError(f"{file} is a folder; give a file, or {hint}")
    if not file.is_file():
        raise InputError(f"no file {file}; paths are relative to a recipe's file, else to the current folder")


def read_rows(path: str | Path, convert: RowConverter[T], is_last: IsLast[T] | None = None) -> list[T]:
    """Read a JSONL or Parquet (`.parquet`) file up to the first row for which `is_last` is true.

    `convert` is called with each row and its name (`file:line`). Raises `InputError` if the file does not exist, has no
    rows, or has invalid ones; the first 20 problems are listed.
    """
    file = Path(path)
    check_data_file(file)
    if file.suffix.lower() == ".parquet":
        return convert_rows(file.name, enumerate(read_parquet(file), 1), convert, is_last)
    with translate_os_errors(file), file.open("rb") as stream:
        return convert_rows(file.name, parse_lines(iter_lines(stream)), convert, is_last)


def iter_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines; one over the size limit comes in several parts, so that memory stays bounded."""
    return iter(lambda: stream.readline(MAX_LINE_BYTES + 2), b"")  # 2 for the end of the line


def parse_lines(lines: Iterable[bytes], parse: RowParser | None = None) -> Iterator[NumberedRow | RowProblem]:
    """Yield the row or the problem of each line that is not blank; `parse` is for lines that are not JSON."""
    number, is_continuation = 1, False
    for line in lines:
        if not is_continuation:
            try:
                text = decode_line(line, is_first=number == 1)
                if text.strip():
                    yield number, (parse or parse_row)(text)
            except RowError as error:
                yield RowProblem(number, error.kind, error.describe())
                if error.kind == WRONG_FILE_TYPE:
                    return
        # Of a line over the limit, only the first part is reported.
        is_continuation = not line.endswith(b"\n")
        number += not is_continuation


def convert_rows(
    name: str, rows: Iterable[NumberedRow | RowProblem], convert: RowConverter[T], is_last: IsLast[T] | None = None
) -> list[T]:
    """Convert rows up to the first for which `is_last` is true; raise `InputError` with all problems, if any."""
    converted: list[T] = []
    problems: list[RowProblem] = []
    for result in convert_each(name, rows, convert):
        if isinstance(result, RowProblem):
            problems.append(result)
        else:
            converted.append(result)
            if is_last is not None and is_last(result):
                break
    if problems:
        raise InputError(format_problems(problems, name))
    if not converted:
        raise InputError(f"{name}: contains no row; {ONE_OBJECT}")
    return converted


def convert_each(
    name: str, rows: Iterable[NumberedRow | RowProblem], convert: RowConverter[T]
) -> Iterator[T | RowProblem]:
    for item in rows:
        if isinstance(item, RowProblem):
            yield item
            continue
        number, row = item
        try:
            value = convert(row, f"{name}:{number}")
        except RowError as error:
            yield RowProblem(number, error.kind, error.describe(row))
        else:
            yield value


def require_text(row: Mapping[str, Any], field: str, accepted: str) -> str:
    """Return a field that must be a non-empty string. Raises `RowError`."""
    if field not in row:
        similar = difflib.get_close_matches(field, row, 1, 0.75)
        meant = f"; {similar[0]} must be called {field}" if similar else ""
        raise RowError("missing fields", f"no field {field}{meant}", accepted)
    value = row[field]
    if not isinstance(value, str):
        remedy = f"put it in quotes; {accepted}" if isinstance(value, int | float) else accepted
        raise RowError("wrong types", "not a string", remedy, field=field)
    if not value.strip():
        raise RowError("empty fields", "empty", "expected a non-empty string", field=field)
    return value


# --- parsing a line


def decode_line(line: bytes, is_first: bool) -> str:
    """Decode a line without its byte-order mark and line end. Raises `RowError`."""
    if is_first:
        line = line.removeprefix(codecs.BOM_UTF8)
        check_file_type(line)
    if len(line.rstrip(b"\r\n")) > MAX_LINE_BYTES:
        raise RowError("long lines", f"a line over {MAX_LINE_BYTES:,} bytes", f"{ONE_OBJECT}, or remove this row")
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8", f"byte {error.start + 1} of the line is not UTF-8", "save as UTF-8") from None


def find_compression(start: bytes) -> str | None:
    return next((program for magic, program in COMPRESSED_FILES.items() if start.startswith(magic)), None)


def check_file_type(line: bytes) -> None:
    program = find_compression(line)
    if program is not None:
        raise RowError(WRONG_FILE_TYPE, f"compressed with {program}", "unpack it")
    if line.startswith(b"PAR1"):
        raise RowError(WRONG_FILE_TYPE, "Parquet by its first bytes", "give the file a name that ends in .parquet")
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RowError(WRONG_FILE_TYPE, "UTF-16 by its first bytes", "save the file as UTF-8")
    if line.strip() == b"{":
        raise RowError(WRONG_FILE_TYPE, "an object on several lines", f"{ONE_OBJECT}: jq -c . < FILE > rows.jsonl")
    if line.lstrip().startswith(b"["):
        raise RowError(WRONG_FILE_TYPE, "the file is one JSON array", f"{ONE_OBJECT}: jq -c '.[]' < FILE > rows.jsonl")


def parse_row(text: str) -> dict[str, Any]:
    """Parse the object on a line as strictly as `parse_json`. Raises `RowError`."""
    try:
        row: Any = STRICT_DECODER.decode(text)
        is_too_deep = text.count("[") + text.count("{") > MAX_JSON_DEPTH and measure_depth(row) > MAX_JSON_DEPTH
    except json.JSONDecodeError as error:
        problem = f"invalid JSON at character {error.pos + 1}: {error.msg}: {make_excerpt(text, error.pos + 1)}"
        raise RowError("bad JSON", problem, ONE_OBJECT) from None
    except RecursionError:
        row, is_too_deep = {}, True
    except ValueError as error:  # a repeated key, or a number that is not accepted
        raise RowError("bad JSON", f"invalid JSON: {error}") from None
    if is_too_deep:
        raise RowError("deep JSON", f"nested deeper than {MAX_JSON_DEPTH}", "use plain fields")
    if not isinstance(row, dict):
        raise RowError("other JSON", f"not an object: {make_excerpt(text)}", ONE_OBJECT)
    for key, value in row.items() if SURROGATE_ESCAPE.search(text) else ():
        if any(map(LONE_SURROGATES.search, iter_texts([key, value]))):
            remedy = "remove them, or write the intended characters"
            raise RowError("lone surrogates", "has lone surrogates", remedy, field=key)
    return row


# --- reporting problems


def format_problems(problems: Sequence[RowProblem], name: str) -> str:
    """Format the first 20 problems, one per line, and count the others by kind."""
    lines = [f"{name}:{p.line}: {p.message}" if p.line else p.message for p in problems[:MAX_REPORTED]]
    rest = Counter(p.kind for p in problems[MAX_REPORTED:])
    if rest:
        lines.append(f"and {rest.total():,} more: " + ", ".join(f"{n:,} {kind}" for kind, n in rest.most_common()))
    return "\n".join(lines)


def is_within_skip_limit(num_invalid: int, num_rows: int) -> bool:
    """Return whether few enough rows are invalid for `on_invalid_row = "skip"` to drop them."""
    return num_invalid * ROWS_PER_SKIP <= num_rows


def make_excerpt(text: str, column: int = 1) -> str:
    """Return at most 80 characters of a line around a column, with control characters escaped."""
    start = max(0, min(column - 1 - EXCERPT_LENGTH // 4, len(text) - EXCERPT_LENGTH))
    characters = (c if c.isprintable() else ascii(c)[1:-1] for c in text[start : start + EXCERPT_LENGTH])
    part = ("…" if start else "") + "".join(characters)
    is_complete = len(part) <= EXCERPT_LENGTH and start + EXCERPT_LENGTH >= len(text)
    return part if is_complete else part[: EXCERPT_LENGTH - 1] + "…"
