"""What papers report of reading with a memory: whole tables, each row with a word on whether runs at hand show it."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from laconic.evaluation.compression.context_qa import ContextTaskResult
from laconic.evaluation.compression.perplexity import SIGNIFICANT_ERRORS
from laconic.evaluation.compression.table import CompressionResult
from laconic.evaluation.report.verdicts import NOT_RUN, judge_equal, worst_verdict

COMPRESSION_TABLES_FILE = Path(__file__).parent / "reported_reading.toml"


class CompressionPaperTable(NamedTuple):
    """A table of a paper: `measured` names, of its first rows, the recipe's row and the way that measure the same."""

    title: str
    source: str
    description: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    measured: Sequence[tuple[str, str]] = ()


class MeasuredInterval(NamedTuple):
    """What a run shows: 95 % of its interval, in the unit of the table."""

    low: float
    high: float


Measurements = Mapping[tuple[str, str, str], MeasuredInterval]  # by a recipe's row, a way, and a column of a table


@cache
def load_compression_tables() -> tuple[CompressionPaperTable, ...]:
    """All tables on reading with a memory."""
    with COMPRESSION_TABLES_FILE.open("rb") as file:
        return tuple(CompressionPaperTable(**row) for row in tomllib.load(file)["table"])


def normalize_column(title: str) -> str:
    """The title of a column as measurements name it: letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", title.lower())


def compare_paper_row(table: CompressionPaperTable, i: int, measured: Measurements) -> str:
    """The word on a row: whether each figure lies inside the interval of a run of its recipe, as far as it is rounded.

    Only the first of several figures in a cell is compared, in domain.
    """
    if i >= len(table.measured):
        return NOT_RUN
    recipe, way = table.measured[i]
    same: list[str] = []
    for title, cell in zip(table.columns[1:], table.rows[i][1:], strict=True):
        figure, found = re.match(r"[−-]?[0-9]*\.?[0-9]+", cell), measured.get((recipe, way, normalize_column(title)))
        if figure is not None and found is not None:
            x = float(figure[0].replace("−", "-"))
            half = 0.5 * 10 ** -len(figure[0].partition(".")[2])
            same.append(judge_equal(x, found.low, found.high, half))
    return worst_verdict(same)


def measure_paper_cells(
    results: Sequence[CompressionResult], file_results: Sequence[ContextTaskResult]
) -> dict[tuple[str, str, str], MeasuredInterval]:
    """What runs of recipes that name a row of a paper show: perplexity by tokens of context, accuracy by file."""
    found: dict[tuple[str, str, str], MeasuredInterval] = {}
    for line in results:
        row, n = str(line.run_info.get("row")), line.dataset.rpartition("-")[2]
        for w in line.gains if n.isdecimal() and "excerpt" not in line.dataset else ():
            found[(row, w.condition, n)] = shown = MeasuredInterval(math.exp(w.nll.low), math.exp(w.nll.high))
            if w.condition == "none":
                found[(row, "compressed", "0")] = shown
    for each in file_results:
        for w in each.icl_scores if each.kind == "labels" else ():
            half = SIGNIFICANT_ERRORS * (w.std or 0.0) / len(w.accuracies) ** 0.5
            found[(str(each.paper_row), w.condition, normalize_column(each.file))] = MeasuredInterval(
                100 * (w.accuracy - half), 100 * (w.accuracy + half)
            )
    return found


def compare_compression_tables(
    results: Sequence[CompressionResult], file_results: Sequence[ContextTaskResult]
) -> list[tuple[CompressionPaperTable, list[tuple[Sequence[str], str]]]]:
    """Every table, each row with the word on what runs at hand show of it."""
    shown = measure_paper_cells(results, file_results)
    return [
        (table, [(row, compare_paper_row(table, i, shown)) for i, row in enumerate(table.rows)])
        for table in load_compression_tables()
    ]
