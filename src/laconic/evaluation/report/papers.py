"""What papers report: accuracies for the table rows that recipes reproduce, and tables beside the results of runs.

A recipe of a table row may differ from the paper, or from the shipped recipe of that row.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.recipe import BOOKKEEPING_KEYS, Recipe
from laconic.config.recipe_keys import flatten
from laconic.evaluation.report.page import PageDetails
from laconic.evaluation.tables import Table

FIGURES_FILE, TABLES_FILE = (Path(__file__).with_name(f"paper_{name}.toml") for name in ("figures", "tables"))
GSM8K_TEST_SETS = ("gsm8k-aug", "gsm8k-aug-nl")  # training sets whose test set is GSM8K's
UNKNOWN_FIGURE = "not known"


class PaperFigure(NamedTuple):
    """Accuracy in percent and a mark of its source."""

    percent: float
    source_mark: str


@cache
def load_paper_figures() -> list[dict[str, Any]]:
    """Return `recipe` (paper table and row) and `figures` (data set, percent and mark) of each row."""
    return tomllib.loads(FIGURES_FILE.read_text(encoding="utf-8"))["row"]


def find_paper_figures(paper_table: str | None, table_row: str | None, dataset: str) -> Sequence[PaperFigure] | None:
    """Return what papers report for a recipe on a data set: empty if unknown, None for a recipe of no paper."""
    if paper_table is None or table_row is None or " table " not in paper_table:
        return None
    rows = [row for row in load_paper_figures() if row["recipe"] == [paper_table, table_row]]
    name = "gsm8k" if dataset in GSM8K_TEST_SETS else dataset
    return [PaperFigure(x["percent"], x["mark"]) for row in rows for x in row["figures"] if x["set"] == name]


def format_paper_figures(figures: Sequence[PaperFigure] | None) -> str:
    if figures is None:
        return "–"
    return " · ".join(f"{figure.percent:g} [{figure.source_mark}]" for figure in figures) or UNKNOWN_FIGURE


@cache
def load_paper_tables() -> list[dict[str, Any]]:
    """Return title, source, topic, columns and rows of each table, and of some a description of sizes and data."""
    return tomllib.loads(TABLES_FILE.read_text(encoding="utf-8"))["table"]


def list_papers(topics: Sequence[str]) -> list[PageDetails]:
    """Return the tables of some topics, folded."""
    return [
        PageDetails(
            f"{table['title']} [{table['source']}]",
            [*filter(None, [table.get("description")]), Table(table["columns"], table["rows"])],
        )
        for table in load_paper_tables()
        if table["topic"] in topics
    ]


# Keys that cannot change what a run learns; the number of training steps can.
IGNORED_KEYS = ("seed", *(key for key in BOOKKEEPING_KEYS if key not in ("train.steps", "train.epochs")))


def recipe_differences(recipe: Recipe) -> list[str]:
    """Return the keys that the recipe lists as deviations, then those that differ from the shipped recipe."""
    if recipe.paper_table is None or recipe.table_row is None:
        return []
    others = [
        changed_keys(recipe, load_recipe(name)[0])
        for name in shipped_recipes().get((recipe.paper_table, recipe.table_row), ())
    ]
    return list(dict.fromkeys((*recipe.deviations, *min(others, key=len, default=[]))))


def changed_keys(ours: Recipe, theirs: Recipe) -> list[str]:
    a, b = (flatten(recipe.model_dump(mode="json")) for recipe in (ours, theirs))
    keys = [key for key in {**a, **b} if key not in IGNORED_KEYS and not key.startswith("deviations.")]
    return [key for key in keys if a.get(key) != b.get(key)]


@cache
def shipped_recipes() -> Mapping[tuple[str, str], Sequence[str]]:
    """Return the names of the shipped recipes by paper table and row; a row may have several."""
    names: dict[tuple[str, str], list[str]] = {}
    for path in sorted(SHIPPED_RECIPES.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if "table_row" in content:
            names.setdefault((content["paper_table"], content["table_row"]), []).append(path.stem)
    return names
