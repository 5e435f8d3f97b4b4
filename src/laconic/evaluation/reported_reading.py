"""What papers report of reading with a memory: whole tables, each row with a word on whether runs at hand show it."""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from laconic.evaluation.contexts import ERRORS
from laconic.evaluation.reading import Line
from laconic.evaluation.told import Told
from laconic.evaluation.verdicts import NOT_RUN, equal, word

FILE = Path(__file__).parent / "reported_reading.toml"


class Table(NamedTuple):
    """A table of a paper: `measured` names, of its first rows, the recipe's row and the way that measure the same."""

    title: str
    source: str
    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    measured: Sequence[tuple[str, str]] = ()


class Shown(NamedTuple):
    """What a run shows: 95 % of its interval, in the unit of the table."""

    low: float
    high: float


Measurements = Mapping[tuple[str, str, str], Shown]  # by a recipe's row, a way, and a column of a table


@cache
def tables() -> tuple[Table, ...]:
    """All tables on reading with a memory."""
    with FILE.open("rb") as file:
        return tuple(Table(**row) for row in tomllib.load(file)["table"])


def column(title: str) -> str:
    """The title of a column as measurements name it: letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", title.lower())


def judged(table: Table, i: int, shown: Measurements) -> str:
    """The word on a row: whether each figure lies inside the interval of a run of its recipe, as far as it is rounded.

    Only the first of several figures in a cell is compared, in domain.
    """
    if i >= len(table.measured):
        return NOT_RUN
    recipe, way = table.measured[i]
    same: list[str] = []
    for title, cell in zip(table.columns[1:], table.rows[i][1:], strict=True):
        figure, found = re.match(r"[−-]?[0-9]*\.?[0-9]+", cell), shown.get((recipe, way, column(title)))
        if figure is not None and found is not None:
            x = float(figure[0].replace("−", "-"))
            half = 0.5 * 10 ** -len(figure[0].partition(".")[2])
            same.append(equal(x, found.low, found.high, half))
    return word(same)


def measurements(lines: Sequence[Line], told: Sequence[Told]) -> dict[tuple[str, str, str], Shown]:
    """What runs of recipes that name a row of a paper show: perplexity by tokens of context, accuracy by file."""
    found: dict[tuple[str, str, str], Shown] = {}
    for line in lines:
        row, n = str(line.about.get("row")), line.set.rpartition("-")[2]
        for w in line.worths if n.isdecimal() and "excerpt" not in line.set else ():
            found[(row, w.way, n)] = shown = Shown(math.exp(w.nats.low), math.exp(w.nats.high))
            if w.way == "none":
                found[(row, "compressed", "0")] = shown
    for each in told:
        for w in each.labelled if each.kind == "labels" else ():
            half = ERRORS * (w.sd or 0.0) / len(w.each) ** 0.5
            found[(str(each.row), w.way, column(each.file))] = Shown(
                100 * (w.accuracy - half), 100 * (w.accuracy + half)
            )
    return found


def judged_rows(lines: Sequence[Line], told: Sequence[Told]) -> list[tuple[Table, list[tuple[Sequence[str], str]]]]:
    """Every table, each row with the word on what runs at hand show of it."""
    shown = measurements(lines, told)
    return [(table, [(row, judged(table, i, shown)) for i, row in enumerate(table.rows)]) for table in tables()]
