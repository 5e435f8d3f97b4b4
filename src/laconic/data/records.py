"""Rows of a file as objects, whatever they are rows of: JSONL read strictly, Parquet; faults at line and column."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from laconic.core.errors import BadInput, on_disk
from laconic.data.lines import LINE, Fault, decoded, members, place, record
from laconic.data.problems import Problem, excerpt, report
from laconic.data.tables import parquet

T = TypeVar("T")
Take = Callable[[dict[str, Any], str, str], T]  # of a row, its text and its name; raises Fault
Row = tuple[int, str | Fault, dict[str, Any]]  # its number from 1, its text or what is wrong with it, the object


def read_records(path: str | Path, take: Take[T], rows: int | None = None) -> tuple[list[T], list[str]]:
    """What `take` makes of each row, of the first `rows` if given; and notes.

    Raises `BadInput` with the first twenty faults and a count of the others.
    """
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"no file {file}; in a recipe a path is relative to it")
    notes: Counter[str] = Counter()
    if file.suffix == ".parquet":
        return taken(file.name, tabled(parquet(file).rows), take, rows, table=True), []
    with on_disk(file), file.open("rb") as stream:
        found = taken(file.name, lined(iter(lambda: stream.readline(LINE + 2), b""), notes), take, rows)
    return found, [f"{file.name}: {text}" + (f" ({n:,} lines)" if n > 1 else "") for text, n in notes.items()]


def lined(lines: Iterable[bytes], notes: Counter[str]) -> Iterator[Row]:
    """The rows of lines."""
    blank = 0
    for number, line in enumerate(lines, 1):
        try:
            text = decoded(line, first=number == 1, notes=notes)
            if not text.strip():
                blank = blank or number
                continue
            if blank:
                fault = Fault(1, "blank lines", "a blank line between rows; delete it, one row stands on each line")
                yield blank, fault, {}
                blank = 0
            yield number, text, record(text)
        except Fault as fault:
            yield number, fault, {}


def tabled(rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """The rows of a table, each with its number and as JSON, in which faults find their field."""
    for number, row in enumerate(rows, 1):
        yield number, json.dumps(row, ensure_ascii=False, default=str), row


def taken(name: str, rows: Iterable[Row], take: Take[T], limit: int | None, *, table: bool = False) -> list[T]:
    """What is made of the rows, or all their faults. Raises `BadInput`."""
    found: list[T] = []
    problems: list[Problem] = []
    for number, text, row in rows:
        if limit is not None and len(found) >= limit:
            break
        if isinstance(text, Fault):
            problems.append(Problem(number, text.column, text.kind, text.text))
            continue
        try:
            found.append(take(row, text, f"{name}:{number}"))
        except Fault as fault:
            problems.append(located(fault, name, number, text if table else None))
    if problems:
        raise BadInput(report(problems, name))
    if not found:
        raise BadInput(f"{name}: no row in it; write one object a line")
    return found


def located(fault: Fault, name: str, number: int, table: str | None) -> Problem:
    """A fault at its line and column; of a table's row, at its number and field."""
    if table is None:
        return Problem(number, fault.column, fault.kind, fault.text)
    field = next((key for key, start, _ in reversed(members(table)) if start <= fault.column), "")
    return Problem(0, 0, fault.kind, f"{name}:row {number}:{field}: {fault.text}")


def text_of(row: Mapping[str, Any], field: str, text: str, accepted: str) -> str:
    """A field that is a text and not empty. Raises `Fault`."""
    if field not in row:
        raise Fault(1, "missing fields", f"{field}: no such field in {excerpt(text)}; {accepted}")
    value, column = row[field], place(text, field)[1]
    if not isinstance(value, str):
        raise Fault(column, "wrong types", f"{field}: no text: {excerpt(text, column)}; put it in quotes; {accepted}")
    if not value.strip():
        raise Fault(column, "empty fields", f"{field}: empty: {excerpt(text, column)}; give a text")
    return value
