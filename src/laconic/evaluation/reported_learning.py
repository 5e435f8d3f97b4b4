"""What papers report of memories that learn: whole tables, each row with a word on whether runs at hand show it."""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from laconic.evaluation.cells import ALL
from laconic.evaluation.stream_table import Measured, figures
from laconic.evaluation.verdicts import PLOT, at_least, word

FILE = Path(__file__).parent / "reported_learning.toml"


class Table(NamedTuple):
    """A table of a paper. `measured` pairs names of rows with the recipes' rows, `cells` columns with what has them."""

    title: str
    source: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    measured: Sequence[tuple[str, str]] = ()
    cells: Sequence[tuple[str, str, str]] = ()


@cache
def tables() -> list[Table]:
    """All there are."""
    with FILE.open("rb") as file:
        return [Table(**row) for row in tomllib.load(file)["table"]]


def words(table: Table, lines: Sequence[Measured]) -> list[str]:
    """Of each row, whether runs show it: a run is of a row where its recipe bears that row's name."""
    return [word_on(table, row, lines) for row in table.rows]


def word_on(table: Table, row: Sequence[str], lines: Sequence[Measured]) -> str:
    """Of one row."""
    if PLOT in row:
        return PLOT
    names = {recipe for name, recipe in table.measured if name == row[0]}
    own = [line for line in lines if line.about.get("row") in names]
    return word(told for column, stream, cell in table.cells for told in judged(table, row, column, stream, cell, own))


def judged(
    table: Table, row: Sequence[str], column: str, stream: str, cell: str, lines: Sequence[Measured]
) -> list[str]:
    """Of each run that has read a stream, whether it reaches the first number that is reported there, in per cent."""
    reported = float(re.findall(r"[\d.]+", row[table.columns.index(column)])[0])
    found: list[str] = []
    for line in lines:
        if line.stream.partition(" ")[0] == stream:
            way = "learn" if "learn" in line.ways else line.ways[0]
            shown = [x.estimate for x in figures(line, way) if x.cell == (cell or ALL)]
            found += [at_least(reported, 100 * x.low, 100 * x.high) for x in shown]
    return found
