"""Accuracy that papers report for the table rows that recipes reproduce, with a mark of its source."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

DATA_FILE = Path(__file__).with_suffix(".toml")
GSM8K_TEST_SETS = ("gsm8k-aug", "gsm8k-aug-nl")  # training sets whose test set is GSM8K's
UNKNOWN_FIGURE = "not known"


class PaperFigure(NamedTuple):
    """Accuracy in percent and a mark of its source."""

    percent: float
    source_mark: str


PaperFigures = Mapping[tuple[str, str], Mapping[str, Sequence[PaperFigure]]]


@cache
def load_paper_figures() -> PaperFigures:
    """Load all figures, by (paper table, row) of a recipe and by data set."""
    with DATA_FILE.open("rb") as file:
        rows = tomllib.load(file)["row"]
    figures: dict[tuple[str, str], dict[str, list[PaperFigure]]] = {}
    for row in rows:
        by_dataset = figures.setdefault((row["recipe"][0], row["recipe"][1]), {})
        for figure in row["figures"]:
            by_dataset.setdefault(figure["set"], []).append(PaperFigure(figure["percent"], figure["mark"]))
    return figures


def find_paper_figures(paper_table: str | None, table_row: str | None, dataset: str) -> Sequence[PaperFigure] | None:
    """Return what papers report for a recipe on a data set: empty if unknown, None for a recipe of no paper."""
    if paper_table is None or table_row is None or " table " not in paper_table:
        return None
    by_dataset = load_paper_figures().get((paper_table, table_row), {})
    return by_dataset.get("gsm8k" if dataset in GSM8K_TEST_SETS else dataset, ())


def format_paper_figures(figures: Sequence[PaperFigure] | None) -> str:
    if figures is None:
        return "–"
    return " · ".join(f"{figure.percent:g} [{figure.source_mark}]" for figure in figures) or UNKNOWN_FIGURE
