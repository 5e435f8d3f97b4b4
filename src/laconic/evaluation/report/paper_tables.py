"""Tables that papers report, for a page beside the results of runs."""

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from laconic.evaluation.report.page import render_details, render_table
from laconic.evaluation.tables import Table

DATA_FILE = Path(__file__).with_suffix(".toml")


@cache
def load_paper_tables() -> list[dict[str, Any]]:
    """Return title, source, topic, columns and rows of each table, and of some a description of sizes and data."""
    return tomllib.loads(DATA_FILE.read_text(encoding="utf-8"))["table"]


def render_papers(topics: Sequence[str]) -> list[Markup]:
    """Return the tables of some topics, folded."""
    return [
        render_details(
            f"{table['title']} [{table['source']}]",
            [*filter(None, [table.get("description")]), render_table(Table(table["columns"], table["rows"]))],
        )
        for table in load_paper_tables()
        if table["topic"] in topics
    ]
