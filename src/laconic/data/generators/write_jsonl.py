"""Rows written as JSONL: the same rows, the same bytes; a file that is there is kept if it is equal, else refused."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from laconic.batches import ReasoningExample
from laconic.errors import BusyError, InputError
from laconic.storage.atomic import write_file_atomically


def example_to_row(example: ReasoningExample) -> dict[str, Any]:
    """An example as an object: its marks after question, steps and answer."""
    said = {"id": example.id, "question": example.question, "steps": list(example.steps), "answer": example.answer}
    return said | dict(example.metadata)


def write_jsonl(
    path: Path, rows: Iterable[Mapping[str, Any]], num_rows: int, before_commit: Callable[[], object] | None = None
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
                    raise conflict_error(path)
                out.write(line)
                written += 1
            if old and old.read(1):
                raise conflict_error(path)
        if written < num_rows:
            raise InputError(f"{path.name}: {num_rows:,} rows asked, there are {written:,}; ask for fewer")
        if before_commit:
            before_commit()

    write_file_atomically(path, write)


def conflict_error(path: Path) -> BusyError:
    """The refusal to write over other rows."""
    return BusyError(f"{path} is there and holds other rows; choose another name, or remove it")
