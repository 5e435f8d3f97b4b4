"""Texts with a label (E3): read, and put in the order in which they become demonstrations."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laconic import rng
from laconic.config.data import SplitName
from laconic.data.documents.load import parse_split
from laconic.data.strict_jsonl import read_rows, require_text
from laconic.errors import InputError

ROW_FORMAT = "a row has text and label"


class LabelledText(NamedTuple):
    """A text, its label, and the part that its row says it belongs to."""

    text: str
    label: str
    split: SplitName | None = None


def parse_labelled_text(row: dict[str, Any], text: str, name: str) -> LabelledText:
    """A row. Raises `Fault`."""
    return LabelledText(
        require_text(row, "text", text, ROW_FORMAT),
        require_text(row, "label", text, ROW_FORMAT),
        parse_split(row, text),
    )


def load_labelled_texts(path: str | Path, split: SplitName | None = None) -> list[LabelledText]:
    """The rows of a file, JSONL or Parquet, that belong to a part; all where they do not say. Raises `BadInput`."""
    every = read_rows(path, parse_labelled_text)[0]
    found = [row for row in every if split is None or row.split in (split, None)]
    labels = {row.label for row in found}
    if len(labels) < 2:
        of = "" if split is None else f" of {split}"
        raise InputError(f"{Path(path).name}: {len(labels)} labels in {len(found):,} rows{of}; give two or more")
    return found


def order_demonstrations(rows: Sequence[LabelledText], seed: int, *, balanced: bool = False) -> list[LabelledText]:
    """The rows in the order of a seed; balanced: label after label, so that each has come as often as any other."""
    drawn = [rows[i] for i in rng.permuted_index(seed, 0, np.arange(len(rows)), len(rows)).tolist()]
    if not balanced:
        return drawn
    turns, seen = [], Counter[str]()
    for row in drawn:
        turns.append(seen[row.label])
        seen[row.label] += 1
    return [drawn[i] for i in sorted(range(len(drawn)), key=lambda i: turns[i])]
