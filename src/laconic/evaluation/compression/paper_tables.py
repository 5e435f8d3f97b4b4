"""Tables of papers on context compression, and whether evaluated runs reproduce their rows."""

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

DATA_FILE = Path(__file__).with_suffix(".toml")


class CompressionPaperTable(NamedTuple):
    """A table of a paper.

    Attributes:
        title: Its title.
        source: Where it is published.
        topic: Section of the page it belongs to: tails, labels, retrieval or ablations.
        columns: Column titles.
        rows: Cells.
        measured: Table row of a recipe, and condition, that measure the same as each of the first rows.
    """

    title: str
    source: str
    topic: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    measured: Sequence[tuple[str, str]] = ()


class MeasuredInterval(NamedTuple):
    """95 % interval of a run, in the unit of the table."""

    low: float
    high: float


Measurements = Mapping[tuple[str, str, str], MeasuredInterval]  # by recipe's table row, condition, table column


@cache
def load_compression_tables() -> tuple[CompressionPaperTable, ...]:
    """Load all tables."""
    with DATA_FILE.open("rb") as file:
        return tuple(CompressionPaperTable(**row) for row in tomllib.load(file)["table"])


def normalize_column(title: str) -> str:
    """Reduce a column title to lower-case letters and digits."""
    return re.sub(r"[^a-z0-9]", "", title.lower())


def compare_paper_row(table: CompressionPaperTable, i: int, measured: Measurements) -> str:
    """Return the verdict on a row: whether its figures, as rounded, lie in the intervals of a run of its recipe.

    If a cell has several figures, the first one (in domain) is compared.
    """
    if i >= len(table.measured):
        return NOT_RUN
    recipe_row, condition = table.measured[i]
    verdicts: list[str] = []
    for title, cell in zip(table.columns[1:], table.rows[i][1:], strict=True):
        figure = re.match(r"[−-]?[0-9]*\.?[0-9]+", cell)
        interval = measured.get((recipe_row, condition, normalize_column(title)))
        if figure is not None and interval is not None:
            value = float(figure[0].replace("−", "-"))
            rounding = 0.5 * 10 ** -len(figure[0].partition(".")[2])
            verdicts.append(judge_equal(value, interval.low, interval.high, rounding))
    return worst_verdict(verdicts)


def measure_paper_cells(
    results: Sequence[CompressionResult], file_results: Sequence[ContextTaskResult]
) -> dict[tuple[str, str, str], MeasuredInterval]:
    """Return the intervals of runs whose recipes name a row: perplexity by context length, accuracy by file."""
    cells: dict[tuple[str, str, str], MeasuredInterval] = {}
    for result in results:
        row, context_tokens = str(result.run_info.get("table_row")), result.dataset.rpartition("-")[2]
        if not context_tokens.isdecimal() or "excerpt" in result.dataset:
            continue
        for gain in result.gains:
            interval = MeasuredInterval(math.exp(gain.nll.low), math.exp(gain.nll.high))
            cells[(row, gain.condition, context_tokens)] = interval
            if gain.condition == "none":
                cells[(row, "compressed", "0")] = interval
    for result in file_results:
        for score in result.icl_scores if result.kind == "labels" else ():
            half = SIGNIFICANT_ERRORS * (score.std or 0.0) / len(score.accuracies) ** 0.5
            cells[(str(result.paper_row), score.condition, normalize_column(result.file))] = MeasuredInterval(
                100 * (score.accuracy - half), 100 * (score.accuracy + half)
            )
    return cells


def compare_compression_tables(
    results: Sequence[CompressionResult], file_results: Sequence[ContextTaskResult]
) -> list[tuple[CompressionPaperTable, list[tuple[Sequence[str], str]]]]:
    """Return every table with the verdict on each row."""
    measured = measure_paper_cells(results, file_results)
    return [
        (table, [(row, compare_paper_row(table, i, measured)) for i, row in enumerate(table.rows)])
        for table in load_compression_tables()
    ]
