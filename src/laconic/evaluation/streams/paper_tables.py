"""Tables that papers report on nested learning and Titans, with a verdict on whether runs reproduce each row."""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from laconic.evaluation.report.verdicts import FIGURE_ONLY, judge_at_least, worst_verdict
from laconic.evaluation.streams.metrics import OVERALL
from laconic.evaluation.streams.table import StreamTaskResult, estimate_metrics

DATA_FILE = Path(__file__).with_suffix(".toml")


class StreamPaperTable(NamedTuple):
    """A table of a paper.

    Attributes:
        title: What it shows.
        source: Paper and table.
        description: Sizes, data and remarks.
        columns: Column names.
        rows: Cells as text.
        row_recipes: Pairs of a row's name and the `table_row` of the recipe that reproduces it.
        column_metrics: Triples of a column, the stream that measures it, and its metric (empty: overall).
    """

    title: str
    source: str
    description: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    row_recipes: Sequence[tuple[str, str]] = ()
    column_metrics: Sequence[tuple[str, str, str]] = ()


@cache
def load_paper_tables() -> list[StreamPaperTable]:
    """Load all tables."""
    with DATA_FILE.open("rb") as file:
        return [StreamPaperTable(**row) for row in tomllib.load(file)["table"]]


def reproduction_verdicts(table: StreamPaperTable, results: Sequence[StreamTaskResult]) -> list[str]:
    """Return a verdict on each row; a run belongs to a row if its recipe names it."""
    return [judge_row(table, row, results) for row in table.rows]


def judge_row(table: StreamPaperTable, row: Sequence[str], results: Sequence[StreamTaskResult]) -> str:
    """Return the verdict on one row."""
    if FIGURE_ONLY in row:
        return FIGURE_ONLY
    names = {recipe for name, recipe in table.row_recipes if name == row[0]}
    matching = [result for result in results if result.run_info.get("table_row") in names]
    return worst_verdict(
        verdict
        for column, stream, metric in table.column_metrics
        for verdict in compare_with_runs(table, row, column, stream, metric, matching)
    )


def compare_with_runs(
    table: StreamPaperTable,
    row: Sequence[str],
    column: str,
    stream: str,
    metric: str,
    results: Sequence[StreamTaskResult],
) -> list[str]:
    """Return for each run on a stream whether it reaches the first number of a cell, in percent."""
    reported = float(re.findall(r"[\d.]+", row[table.columns.index(column)])[0])
    verdicts: list[str] = []
    for result in results:
        if result.stream == stream:
            condition = "learn" if "learn" in result.conditions else result.conditions[0]
            estimates = [x.estimate for x in estimate_metrics(result, condition) if x.metric == (metric or OVERALL)]
            verdicts += [judge_at_least(reported, 100 * x.low, 100 * x.high) for x in estimates]
    return verdicts
