"""Tables that papers report, for a page beside the results of runs."""

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from laconic.evaluation.report.page import render_details, render_table
from laconic.evaluation.tables import Table

DATA_FILE = Path(__file__).with_suffix(".toml")


class PaperTable(NamedTuple):
    """A table of a paper.

    Attributes:
        title: What it shows.
        source: Where it is published.
        topic: Section of the page: tails, labels, retrieval, ablations or nested.
        columns: Column titles.
        rows: Cells.
        description: Sizes, data and remarks.
    """

    title: str
    source: str
    topic: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    description: str = ""


@cache
def load_paper_tables() -> tuple[PaperTable, ...]:
    with DATA_FILE.open("rb") as file:
        return tuple(PaperTable(**row) for row in tomllib.load(file)["table"])


def render_papers(topics: Sequence[str]) -> list[Markup]:
    """Return the tables of some topics, folded."""
    return [
        render_details(
            f"{table.title} [{table.source}]",
            [*filter(None, [table.description]), render_table(Table(table.columns, table.rows))],
        )
        for table in load_paper_tables()
        if table.topic in topics
    ]
