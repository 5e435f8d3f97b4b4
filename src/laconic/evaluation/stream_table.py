"""Streams measured, of one seed or several: means with their spread and interval, as JSON and on a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.cells import ALL
from laconic.evaluation.listening import Row
from laconic.evaluation.report import percent
from laconic.evaluation.statistics import Estimate, Scores

NATS = (
    "ppl",
    "ppl (test)",
    "ppl (valid)",
    "books",
    "levels",
)  # streams whose scores are nats; of all others they are shares


@dataclass(frozen=True)
class Measured:
    """A run on a stream: the rows of each seed. `about` is what the run is."""

    stream: str
    run: str
    seeds: tuple[int, ...]
    rows: Sequence[Sequence[Row]]
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ways(self) -> list[str]:
        """The ways that items were read in."""
        return list(self.rows[0][0].ways)


class Figure(NamedTuple):
    """A cell of a way over the items that have it, which count alike, and over the seeds."""

    cell: str
    estimate: Estimate


def column(rows: Sequence[Sequence[Row]], way: str, cell: str) -> Scores:
    """The score of every item that has the cell, [R, N]."""
    found = [[row.ways[way].cells.get(cell) for row in each] for each in rows]
    return np.array([[score / n for score, n in filter(None, each)] for each in found], dtype=np.float64)


def figures(line: Measured, way: str) -> list[Figure]:
    """Every cell of a way: all first, then by name, numbers in their order."""
    names = {cell for row in line.rows[0] for cell in row.ways[way].cells}
    estimate = statistics.estimate if line.stream in NATS else statistics.share
    order = sorted(names, key=lambda cell: (cell != ALL, natural(cell)))
    return [Figure(cell, estimate(column(line.rows, way, cell))) for cell in order]


def natural(text: str) -> list[tuple[bool, int, str]]:
    """A key by which 8 stands before 16."""
    parts = "".join(c if c.isdigit() else f" {c} " for c in text).split()
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def fired(line: Measured, way: str) -> list[float]:
    """How often each level fired in reading an item, the mean over items, layers and seeds."""
    return np.mean([row.ways[way].updates for rows in line.rows for row in rows], axis=0).tolist()


def held(line: Measured, way: str) -> int:
    """Bytes of an item's state at its end, the mean."""
    return round(float(np.mean([row.ways[way].bytes for rows in line.rows for row in rows])))


def plain(line: Measured) -> dict[str, Any]:
    """All figures as JSON holds them."""
    ways = {
        way: {
            "cells": {each.cell: each.estimate._asdict() for each in figures(line, way)},
            "updates": fired(line, way),
            "state_bytes": held(line, way),
        }
        for way in line.ways
    }
    unit = "nats" if line.stream in NATS else "share"
    items = len(line.rows[0])
    return {"stream": line.stream, "run": line.run, **line.about, "seeds": list(line.seeds), "items": items,
            "unit": unit, "ways": ways}  # fmt: skip


def shown(lines: Sequence[Measured]) -> Any:
    """The table of a terminal."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="")
    for name in ("stream", "run", "way", "cell"):
        made.add_column(name, no_wrap=True)
    for name in ("score", "95 %", "items", "updates", "state"):
        made.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        for way in line.ways:
            updates = ", ".join(f"{n:.4g}" for n in fired(line, way)) or "–"
            for each in figures(line, way):
                at, (low, high) = said(line, each.estimate), bounds(line, each.estimate)
                made.add_row(line.stream, line.run, way, each.cell, at, f"{low} to {high}",
                             str(each.estimate.questions), updates, f"{held(line, way):,}")  # fmt: skip
    return made


def said(line: Measured, found: Estimate) -> str:
    """A mean, and its standard deviation over seeds."""
    if line.stream in NATS:
        return f"{found.mean:.4f}" + ("" if found.sd is None else f" ± {found.sd:.4f}")
    return f"{percent(found.mean)} %" + ("" if found.sd is None else f" ± {100 * found.sd:.1f}")


def bounds(line: Measured, found: Estimate) -> tuple[str, str]:
    """The ends of an interval."""
    if line.stream in NATS:
        return f"{found.low:.4f}", f"{found.high:.4f}"
    return percent(found.low), percent(found.high)


LEGEND = (
    "score: nats (ppl) or per cent; items of a cell count alike; updates: of each level while an item was read, the "
    "fastest first; state: bytes of one sequence at its end. learn: fast weights move; still: they do not."
)
