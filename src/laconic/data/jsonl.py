"""Rows written as JSONL: the same rows, the same bytes; a file that is there is kept if it is equal, else refused."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from laconic.core.artifact import replace_file
from laconic.core.contract import Example
from laconic.core.errors import BadInput, Busy


def fields(example: Example) -> dict[str, Any]:
    """An example as an object: its marks after question, steps and answer."""
    said = {"id": example.id, "question": example.question, "steps": list(example.steps), "answer": example.answer}
    return said | dict(example.flags)


def write_rows(
    path: Path, rows: Iterable[Mapping[str, Any]], asked: int, beside: Callable[[], object] | None = None
) -> None:
    """As many rows as asked, one object a line, whole or not at all.

    `beside` writes what belongs to it: when the rows are there, before the file has its name; its error leaves neither.
    Raises `Busy` (73) where a file of other bytes has the name, as soon as a row differs, and `BadInput` (66) where
    there are fewer rows.
    """

    def write(new: Path) -> None:
        written = 0
        with new.open("wb") as out, (path if path.exists() else new).open("rb") as there:
            old = there if path.exists() else None
            for row in rows:
                line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
                if old and old.readline() != line:
                    raise other(path)
                out.write(line)
                written += 1
            if old and old.read(1):
                raise other(path)
        if written < asked:
            raise BadInput(f"{path.name}: {asked:,} rows asked, there are {written:,}; ask for fewer")
        if beside:
            beside()

    replace_file(path, write)


def other(path: Path) -> Busy:
    """The refusal to write over other rows."""
    return Busy(f"{path} is there and holds other rows; choose another name, or remove it")
