"""What the papers report for the table rows that recipes name, with a mark of where each figure comes from."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

DATA_FILE = Path(__file__).with_suffix(".toml")
GSM8K_TEST_SETS = ("gsm8k-aug", "gsm8k-aug-nl")  # sets of the papers, whose test is that of GSM8K
UNKNOWN_FIGURE = "not known"


class PaperFigure(NamedTuple):
    """Accuracy in percent, and who says so."""

    percent: float
    source_mark: str


PaperFigures = Mapping[tuple[str, str], Mapping[str, Sequence[PaperFigure]]]


@cache
def load_paper_figures() -> PaperFigures:
    """All there are: by (source, row) of a recipe, then by set."""
    with DATA_FILE.open("rb") as file:
        rows = tomllib.load(file)["row"]
    found: dict[tuple[str, str], dict[str, list[PaperFigure]]] = {}
    for row in rows:
        sets = found.setdefault((row["recipe"][0], row["recipe"][1]), {})
        for figure in row["figures"]:
            sets.setdefault(figure["set"], []).append(PaperFigure(figure["percent"], figure["mark"]))
    return found


def find_paper_figures(source: str | None, row: str | None, dataset: str) -> Sequence[PaperFigure] | None:
    """What papers report for a recipe on a set: nothing, where that is not known; None for a recipe of no paper."""
    if source is None or row is None or " table " not in source:
        return None
    sets = load_paper_figures().get((source, row), {})
    return sets.get("gsm8k" if dataset in GSM8K_TEST_SETS else dataset, ())


def format_paper_figures(figures: Sequence[PaperFigure] | None) -> str:
    """The figures with their marks."""
    if figures is None:
        return "–"
    return " · ".join(f"{each.percent:g} [{each.source_mark}]" for each in figures) or UNKNOWN_FIGURE
