"""The texts of a JSONL file, read line by line as they are asked for: the field `text` of each row."""

from collections import Counter
from collections.abc import Iterable, Iterator

from laconic.data.problems import make_excerpt
from laconic.data.records import parse_lines
from laconic.data.strict_jsonl import RowError, locate_field
from laconic.errors import InputError

ACCEPTED_FIELDS = 'a row is {"text": "…"}, and may have an "id"'


def iter_texts(lines: Iterable[bytes], file: str) -> Iterator[tuple[str, str]]:
    """The name of each row, its id or file and line, and its text. Raises `BadInput` at the first fault."""
    for number, text, row in parse_lines(lines, Counter()):
        fault = text if isinstance(text, RowError) else None
        try:
            found = "" if isinstance(text, RowError) else get_text(row, text)
        except RowError as wrong:
            fault, found = wrong, ""
        if fault is not None:
            raise InputError(f"{file}:{number}:{fault.column}: {fault.message}")
        yield str(row.get("id", f"{file}:{number}")), found


def get_text(row: dict[str, object], line: str) -> str:
    """The text of a row. Raises `Fault`."""
    found = row.get("text")
    if isinstance(found, str) and found.strip():
        return found
    if "text" not in row:
        raise RowError(1, "missing fields", f"text: no such field in {make_excerpt(line)}; {ACCEPTED_FIELDS}")
    column = locate_field(line, "text")[1]
    why = "empty" if isinstance(found, str) else "no text"
    raise RowError(column, "wrong types", f"text: {why}: {make_excerpt(line, column)}; {ACCEPTED_FIELDS}")
