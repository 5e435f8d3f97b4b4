"""Labelled texts for classification, and their order as demonstrations in a context."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from laconic import rng
from laconic.config.data import SplitName
from laconic.data.documents.load import parse_split
from laconic.data.reasoning.columns import normalise_number
from laconic.data.strict_jsonl import read_rows, require_text
from laconic.errors import InputError

ROW_FORMAT = "a row has text (or utterance, query, sentence) and label (or label_text, intent)"
TEXT_FIELDS = ("text", "utterance", "query", "sentence")
LABEL_FIELDS = ("label_text", "label_name", "label", "intent")  # words before numbers


class LabelledText(NamedTuple):
    """A text, its label, and the split that its row names, if any."""

    text: str
    label: str
    split: SplitName | None = None


def parse_labelled_text(row: dict[str, Any], name: str) -> LabelledText:
    """Parse a row; a number as label is read as its digits."""
    text_field = next((field for field in TEXT_FIELDS if field in row), "text")
    label_field = next((field for field in LABEL_FIELDS if row.get(field) is not None), "label")
    label = row.get(label_field)
    if isinstance(label, int | float):
        row = row | {label_field: normalise_number(label)}
    return LabelledText(
        require_text(row, text_field, ROW_FORMAT), require_text(row, label_field, ROW_FORMAT), parse_split(row)
    )


def load_labelled_texts(path: str | Path) -> list[LabelledText]:
    rows = read_rows(path, parse_labelled_text)
    labels = {row.label for row in rows}
    if len(labels) < 2:
        raise InputError(f"{Path(path).name}: fewer than two different labels; give two or more")
    return rows


def normalise_text(text: str) -> str:
    """Return the words of a text for comparison, or the text if it has none, such as an emoji."""
    return find_words(text) or text.strip()


def find_words(text: str) -> str:
    """Return a text in lower case, with single spaces for all but letters, their marks, digits and "_"."""
    composed = unicodedata.normalize("NFC", text.lower())
    words = "".join(c if c == "_" or unicodedata.category(c)[0] in "LMN" else " " for c in composed)
    return " ".join(words.split())


def order_demonstrations(rows: Sequence[LabelledText], seed: int, *, balanced: bool = False) -> list[LabelledText]:
    """Shuffle demonstrations by a seed; balanced ones take the labels in turn."""
    shuffled = [rows[i] for i in rng.permutation(len(rows), seed)]
    if not balanced:
        return shuffled
    turns = list[int]()
    counts = Counter[str]()
    for row in shuffled:
        turns.append(counts[row.label])
        counts[row.label] += 1
    return [shuffled[i] for i in sorted(range(len(shuffled)), key=lambda i: turns[i])]
