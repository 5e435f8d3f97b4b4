"""Texts with a label (E3): read, and put in the order in which they become demonstrations."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laconic.core import keyed
from laconic.core.errors import BadInput
from laconic.data.records import read_records, text_of
from laconic.data.settings import Part
from laconic.data.text import part_of

ACCEPTED = "a row has text and label"


class Labelled(NamedTuple):
    """A text, its label, and the part that its row says it belongs to."""

    text: str
    label: str
    part: Part | None = None


def labelled(row: dict[str, Any], text: str, name: str) -> Labelled:
    """A row. Raises `Fault`."""
    return Labelled(text_of(row, "text", text, ACCEPTED), text_of(row, "label", text, ACCEPTED), part_of(row, text))


def read_labelled(path: str | Path, part: Part | None = None) -> list[Labelled]:
    """The rows of a file, JSONL or Parquet, that belong to a part; all where they do not say. Raises `BadInput`."""
    every = read_records(path, labelled)[0]
    found = [row for row in every if part is None or row.part in (part, None)]
    labels = {row.label for row in found}
    if len(labels) < 2:
        of = "" if part is None else f" of {part}"
        raise BadInput(f"{Path(path).name}: {len(labels)} labels in {len(found):,} rows{of}; give two or more")
    return found


def demonstrations(rows: Sequence[Labelled], seed: int, *, balanced: bool = False) -> list[Labelled]:
    """The rows in the order of a seed; balanced: label after label, so that each has come as often as any other."""
    drawn = [rows[i] for i in keyed.index(seed, 0, np.arange(len(rows)), len(rows)).tolist()]
    if not balanced:
        return drawn
    turns, seen = [], Counter[str]()
    for row in drawn:
        turns.append(seen[row.label])
        seen[row.label] += 1
    return [drawn[i] for i in sorted(range(len(drawn)), key=lambda i: turns[i])]
