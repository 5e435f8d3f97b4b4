"""What the papers report for the table rows that recipes name, with a mark of where each figure comes from."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "reported.toml"
SAME = ("gsm8k-aug", "gsm8k-aug-nl")  # sets of the papers, whose test is that of GSM8K
UNKNOWN = "not known"


class Reported(NamedTuple):
    """Accuracy in percent, and who says so."""

    percent: float
    mark: str


Figures = Mapping[tuple[str, str], Mapping[str, Sequence[Reported]]]


@cache
def figures() -> Figures:
    """All there are: by (source, row) of a recipe, then by set."""
    with FILE.open("rb") as file:
        rows = tomllib.load(file)["row"]
    found: dict[tuple[str, str], dict[str, list[Reported]]] = {}
    for row in rows:
        sets = found.setdefault((row["recipe"][0], row["recipe"][1]), {})
        for figure in row["figures"]:
            sets.setdefault(figure["set"], []).append(Reported(figure["percent"], figure["mark"]))
    return found


def reported(source: str | None, row: str | None, name: str) -> Sequence[Reported] | None:
    """What papers report for a recipe on a set: nothing, where that is not known; None for a recipe of no paper."""
    if source is None or row is None or " table " not in source:
        return None
    sets = figures().get((source, row), {})
    return sets.get("gsm8k" if name in SAME else name, ())


def words(found: Sequence[Reported] | None) -> str:
    """The figures with their marks."""
    if found is None:
        return "–"
    return " · ".join(f"{each.percent:g} [{each.mark}]" for each in found) or UNKNOWN
