"""What papers report of memories that learn: whole tables, each row with a word on whether runs at hand show it."""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from laconic.evaluation.report.verdicts import FIGURE_ONLY, judge_at_least, worst_verdict
from laconic.evaluation.streams.metrics import OVERALL
from laconic.evaluation.streams.table import StreamResult, estimate_metrics

DATA_FILE = Path(__file__).parent / "reported_learning.toml"


class PaperTable(NamedTuple):
    """A table of a paper. `measured` pairs names of rows with the recipes' rows, `cells` columns with what has them."""

    title: str
    source: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    measured: Sequence[tuple[str, str]] = ()
    cells: Sequence[tuple[str, str, str]] = ()


@cache
def load_paper_tables() -> list[PaperTable]:
    """All there are."""
    with DATA_FILE.open("rb") as file:
        return [PaperTable(**row) for row in tomllib.load(file)["table"]]


def reproduction_verdicts(table: PaperTable, results: Sequence[StreamResult]) -> list[str]:
    """Of each row, whether runs show it: a run is of a row where its recipe bears that row's name."""
    return [judge_row(table, row, results) for row in table.rows]


def judge_row(table: PaperTable, row: Sequence[str], results: Sequence[StreamResult]) -> str:
    """Of one row."""
    if FIGURE_ONLY in row:
        return FIGURE_ONLY
    names = {recipe for name, recipe in table.measured if name == row[0]}
    own = [line for line in results if line.run_info.get("row") in names]
    return worst_verdict(
        told
        for column, stream, cell in table.cells
        for told in compare_with_runs(table, row, column, stream, cell, own)
    )


def compare_with_runs(
    table: PaperTable, row: Sequence[str], column: str, stream: str, metric: str, results: Sequence[StreamResult]
) -> list[str]:
    """Of each run that has read a stream, whether it reaches the first number that is reported there, in per cent."""
    reported = float(re.findall(r"[\d.]+", row[table.columns.index(column)])[0])
    found: list[str] = []
    for line in results:
        if line.stream.partition(" ")[0] == stream:
            way = "learn" if "learn" in line.conditions else line.conditions[0]
            shown = [x.estimate for x in estimate_metrics(line, way) if x.metric == (metric or OVERALL)]
            found += [judge_at_least(reported, 100 * x.low, 100 * x.high) for x in shown]
    return found
