"""Tables that papers report, with a verdict on each row: whether the confidence intervals of runs reproduce it."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from laconic.evaluation.report.page import render_details, render_table
from laconic.evaluation.tables import Table

DATA_FILE = Path(__file__).with_suffix(".toml")
NOT_RUN, REPRODUCED, NOT_REPRODUCED = "not run", "reproduced", "not reproduced"
TOO_WIDE, FIGURE_ONLY = "interval too wide to tell", "figure only"
MAX_RELATIVE_WIDTH = 0.05  # of the figure; a 95 % interval that reaches further to one side decides nothing


class PaperTable(NamedTuple):
    """A table of a paper.

    Attributes:
        title: What it shows.
        source: Where it is published.
        topic: Section of the page: tails, labels, retrieval, ablations or nested.
        columns: Column titles.
        rows: Cells; if a cell has several figures, the first one is compared.
        measured: Table row of a recipe, and condition, that measure the same as each of the first rows.
        measured_columns: Name of the measurement of a column, where it is not the title.
        comparison: "equal", or "at least" where more is better and the figure is a share in percent.
        description: Sizes, data and remarks.
    """

    title: str
    source: str
    topic: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    measured: Sequence[tuple[str, str]] = ()
    measured_columns: Mapping[str, str] = {}
    comparison: str = "equal"
    description: str = ""


class Measurement(NamedTuple):
    """The 95 % interval of a run: table row of its recipe, condition, and column; in the unit of the paper's table."""

    table_row: str | None
    condition: str
    column: str
    low: float
    high: float


@cache
def load_paper_tables() -> tuple[PaperTable, ...]:
    """Load all tables."""
    with DATA_FILE.open("rb") as file:
        return tuple(PaperTable(**row) for row in tomllib.load(file)["table"])


def render_papers(topics: Sequence[str], measurements: Sequence[Measurement]) -> list[Markup]:
    """Return the tables of some topics, folded, with the verdict on each row."""
    blocks: list[Markup] = []
    for table in (table for table in load_paper_tables() if table.topic in topics):
        rows = [[*row, judge_row(table, i, measurements)] for i, row in enumerate(table.rows)]
        content = render_table(Table([*table.columns, "these runs"], rows))
        blocks.append(render_details(f"{table.title} [{table.source}]", [*filter(None, [table.description]), content]))
    return blocks


def judge_row(table: PaperTable, i: int, measurements: Sequence[Measurement]) -> str:
    """Return the verdict on row `i`: the worst one on its figures."""
    if FIGURE_ONLY in table.rows[i]:
        return FIGURE_ONLY
    if i >= len(table.measured):
        return NOT_RUN
    verdicts: list[str] = []
    for title, cell in zip(table.columns[1:], table.rows[i][1:], strict=True):
        figure = re.match(r"[−-]?[0-9]*\.?[0-9]+", cell)
        key = (*table.measured[i], normalize_column(table.measured_columns.get(title, title)))
        for m in measurements if figure else ():
            if figure and (m.table_row, m.condition, normalize_column(m.column)) == key:
                verdicts.append(judge_figure(figure[0].replace("−", "-"), m.low, m.high, table.comparison))
    return worst_verdict(verdicts)


def normalize_column(title: str) -> str:
    """Reduce a column title to lower-case letters and digits."""
    return re.sub(r"[^a-z0-9]", "", title.lower())


def worst_verdict(verdicts: Iterable[str]) -> str:
    """Return the worst verdict on the figures of a row."""
    distinct = set(verdicts)
    return next((verdict for verdict in (NOT_REPRODUCED, TOO_WIDE, REPRODUCED) if verdict in distinct), NOT_RUN)


def judge_figure(text: str, low: float, high: float, comparison: str = "equal") -> str:
    """Return whether an interval contains a figure, as rounded, or reaches it where more is better."""
    figure, rounding = float(text), 0.5 * 10 ** -len(text.partition(".")[2])
    if comparison == "at least":
        is_consistent, is_narrow = high >= figure, low >= (1 - MAX_RELATIVE_WIDTH) * figure
    else:
        is_consistent = low - rounding <= figure <= high + rounding
        is_narrow = high - low <= 2 * MAX_RELATIVE_WIDTH * abs(figure)
    return NOT_REPRODUCED if not is_consistent else REPRODUCED if is_narrow else TOO_WIDE
