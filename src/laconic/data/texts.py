"""The texts of a JSONL file, read line by line as they are asked for: the field `text` of each row."""

from collections import Counter
from collections.abc import Iterable, Iterator

from laconic.core.errors import BadInput
from laconic.data.lines import Fault, place
from laconic.data.problems import excerpt
from laconic.data.records import lined

ACCEPTED = 'a row is {"text": "…"}, and may have an "id"'


def texts_of_lines(lines: Iterable[bytes], file: str) -> Iterator[tuple[str, str]]:
    """The name of each row, its id or file and line, and its text. Raises `BadInput` at the first fault."""
    for number, text, row in lined(lines, Counter()):
        fault = text if isinstance(text, Fault) else None
        try:
            found = "" if isinstance(text, Fault) else text_of(row, text)
        except Fault as wrong:
            fault, found = wrong, ""
        if fault is not None:
            raise BadInput(f"{file}:{number}:{fault.column}: {fault.text}")
        yield str(row.get("id", f"{file}:{number}")), found


def text_of(row: dict[str, object], line: str) -> str:
    """The text of a row. Raises `Fault`."""
    found = row.get("text")
    if isinstance(found, str) and found.strip():
        return found
    if "text" not in row:
        raise Fault(1, "missing fields", f"text: no such field in {excerpt(line)}; {ACCEPTED}")
    column = place(line, "text")[1]
    why = "empty" if isinstance(found, str) else "no text"
    raise Fault(column, "wrong types", f"text: {why}: {excerpt(line, column)}; {ACCEPTED}")
