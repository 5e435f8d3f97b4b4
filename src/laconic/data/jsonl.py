"""Rows written as JSONL: the same rows, the same bytes; a file that is there is kept if it is equal, else refused."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from laconic.core.artifact import replace_file
from laconic.core.contract import Example
from laconic.core.errors import Busy


def row(example: Example) -> dict[str, Any]:
    """An example as an object: its marks after question, steps and answer."""
    said = {"id": example.id, "question": example.question, "steps": list(example.steps), "answer": example.answer}
    return said | dict(example.flags)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """The number of rows written, one object a line, whole or not at all.

    Raises `Busy` (73) where a file of other bytes has the name, as soon as a row differs.
    """
    written = 0

    def write(new: Path) -> None:
        nonlocal written
        with new.open("wb") as out, (path if path.exists() else new).open("rb") as there:
            for fields in rows:
                line = (json.dumps(fields, ensure_ascii=False) + "\n").encode()
                if there.name != str(new) and there.readline() != line:
                    raise differs(path)
                out.write(line)
                written += 1
            if there.name != str(new) and there.read(1):
                raise differs(path)

    replace_file(path, write)
    return written


def differs(path: Path) -> Busy:
    """The refusal to write over other rows."""
    return Busy(f"{path} is there and holds other rows; choose another name, or remove it")
