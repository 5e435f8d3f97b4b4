"""Write generated rows as JSONL, reproducibly: an existing equal file is kept, a different one is never overwritten."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from laconic.batches import ReasoningExample
from laconic.errors import BusyError, InputError
from laconic.storage.atomic import write_named_file


def example_to_row(example: ReasoningExample) -> dict[str, Any]:
    row = {"id": example.id, "question": example.question, "steps": list(example.steps), "answer": example.answer}
    return row | dict(example.metadata)


def write_jsonl(
    path: Path, rows: Iterable[Mapping[str, Any]], num_rows: int, before_commit: Callable[[], object] | None = None
) -> None:
    """Write rows to a file atomically; `before_commit` writes other files first, and if it fails, none is created.

    Raises `BusyError` as soon as a row differs from an existing file, `InputError` for fewer rows than expected.
    """
    conflict = BusyError(f"{path} exists and has other rows; choose another name, or remove it")
    if path.exists() and not path.is_file():
        raise conflict

    def write(new: Path) -> None:
        count = 0
        with new.open("wb") as out, path.open("rb") if path.exists() else nullcontext() as old:
            for row in rows:
                line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
                if old and old.readline() != line:
                    raise conflict
                out.write(line)
                count += 1
            if old and old.read(1):
                raise conflict
        if count < num_rows:
            raise InputError(f"{path.name}: only {count:,} of {num_rows:,} rows can be generated; lower the number")
        if before_commit:
            before_commit()

    write_named_file(path, write)
