"""Rows of a file as objects, whatever they are rows of: JSONL read strictly, Parquet; faults at line and column."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from laconic.data.parquet_and_hub import read_parquet
from laconic.data.problems import RowProblem, format_problems, make_excerpt
from laconic.data.strict_jsonl import MAX_LINE_BYTES, RowError, decode_line, locate_field, locate_fields, parse_row
from laconic.errors import InputError, translate_os_errors

T = TypeVar("T")
RowConverter = Callable[[dict[str, Any], str, str], T]  # of a row, its text and its name; raises Fault
NumberedRow = tuple[
    int, str | RowError, dict[str, Any]
]  # its number from 1, its text or what is wrong with it, the object


def read_rows(path: str | Path, convert: RowConverter[T], max_rows: int | None = None) -> tuple[list[T], list[str]]:
    """What `take` makes of each row, of the first `rows` if given; and notes.

    Raises `BadInput` with the first twenty faults and a count of the others.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"no file {file}; in a recipe a path is relative to it")
    notes: Counter[str] = Counter()
    if file.suffix == ".parquet":
        return convert_rows(file.name, number_table_rows(read_parquet(file).rows), convert, max_rows, is_table=True), []
    with translate_os_errors(file), file.open("rb") as stream:
        found = convert_rows(
            file.name, parse_lines(iter(lambda: stream.readline(MAX_LINE_BYTES + 2), b""), notes), convert, max_rows
        )
    return found, [f"{file.name}: {text}" + (f" ({n:,} lines)" if n > 1 else "") for text, n in notes.items()]


def parse_lines(lines: Iterable[bytes], notes: Counter[str]) -> Iterator[NumberedRow]:
    """The rows of lines."""
    blank = 0
    for number, line in enumerate(lines, 1):
        try:
            text = decode_line(line, first=number == 1, notes=notes)
            if not text.strip():
                blank = blank or number
                continue
            if blank:
                fault = RowError(1, "blank lines", "a blank line between rows; delete it, one row stands on each line")
                yield blank, fault, {}
                blank = 0
            yield number, text, parse_row(text)
        except RowError as fault:
            yield number, fault, {}


def number_table_rows(rows: Iterable[dict[str, Any]]) -> Iterator[NumberedRow]:
    """The rows of a table, each with its number and as JSON, in which faults find their field."""
    for number, row in enumerate(rows, 1):
        yield number, json.dumps(row, ensure_ascii=False, default=str), row


def convert_rows(
    name: str, rows: Iterable[NumberedRow], convert: RowConverter[T], max_rows: int | None, *, is_table: bool = False
) -> list[T]:
    """What is made of the rows, or all their faults. Raises `BadInput`."""
    found: list[T] = []
    problems: list[RowProblem] = []
    for number, text, row in rows:
        if max_rows is not None and len(found) >= max_rows:
            break
        if isinstance(text, RowError):
            problems.append(RowProblem(number, text.column, text.kind, text.message))
            continue
        try:
            found.append(convert(row, text, f"{name}:{number}"))
        except RowError as fault:
            problems.append(locate_problem(fault, name, number, text if is_table else None))
    if problems:
        raise InputError(format_problems(problems, name))
    if not found:
        raise InputError(f"{name}: no row in it; write one object a line")
    return found


def locate_problem(fault: RowError, name: str, number: int, table: str | None) -> RowProblem:
    """A fault at its line and column; of a table's row, at its number and field."""
    if table is None:
        return RowProblem(number, fault.column, fault.kind, fault.message)
    field = next((key for key, start, _ in reversed(locate_fields(table)) if start <= fault.column), "")
    return RowProblem(0, 0, fault.kind, f"{name}:row {number}:{field}: {fault.message}")


def require_text(row: Mapping[str, Any], field: str, text: str, accepted: str) -> str:
    """A field that is a text and not empty. Raises `Fault`."""
    if field not in row:
        raise RowError(1, "missing fields", f"{field}: no such field in {make_excerpt(text)}; {accepted}")
    value, column = row[field], locate_field(text, field)[1]
    if not isinstance(value, str):
        raise RowError(
            column, "wrong types", f"{field}: no text: {make_excerpt(text, column)}; put it in quotes; {accepted}"
        )
    if not value.strip():
        raise RowError(column, "empty fields", f"{field}: empty: {make_excerpt(text, column)}; give a text")
    return value
