"""Quality against the number of vectors (E5): points, the line through fixed lengths, and what lies above it.

Quality is accuracy where documents hold facts, else nats per scored token with its sign turned, so that more is better.
Symbols: x mean vectors of a segment, R seeds, N documents, beta nats that a vector costs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from laconic.evaluation.contexts import ERRORS, column, groups, rights, standard_error, vectors, ways_of
from laconic.evaluation.reading import Line
from laconic.evaluation.scored import Row
from laconic.evaluation.statistics import Scores

FIXED, LEARNED, END, ORACLE = "fixed lengths", "learned length", "end of the text", "best length, by trial"
PRICES = tuple(0.01 * 10 ** (i / 5) for i in range(18))  # of the best lengths


class Point(NamedTuple):
    """A way of a run: x of each seed, quality [R, N]; `documents` are what it was measured on.

    `generator` is how the run's vectors arise.
    """

    documents: tuple[tuple[str, int | None, tuple[int, ...]], ...]
    run: str
    way: str
    kind: str
    generator: str | None
    seeds: tuple[int, ...]
    x: tuple[float, ...]
    scores: Scores

    @property
    def texts(self) -> list[str] | None:
        """The texts that errors are taken over."""
        return groups([name for name, _, _ in self.documents])

    @property
    def at(self) -> tuple[float, float]:
        """Mean x, and mean quality."""
        return float(np.mean(self.x)), float(self.scores.mean())


class Verdict(NamedTuple):
    """A learned length less the line through fixed lengths at the same mean: `se` over documents and seeds.

    `line` says whose lengths those are; `helps` is above by more than `ERRORS` standard errors.
    """

    run: str
    way: str
    line: str
    x: float
    quality: float
    fixed: float
    apart: float
    se: float
    helps: bool


def quality(line: Line, way: str) -> Scores:
    """[R, N]."""
    return rights(line.rows, way) if line.facts else -column(line.rows, way)


def kind_of(line: Line, way: str) -> str | None:
    """Which line of the picture a way belongs to; None: it is no point of it."""
    if way.startswith("end"):
        return END
    if way == "oracle length":
        return ORACLE
    if way.startswith("n = ") or (way == "compressed" and line.about.get("length") == "fixed"):
        return FIXED
    learned = way in ("compressed", "sampled") or way.startswith("quantile")
    return LEARNED if learned and line.about.get("length") in ("stop", "ratio") else None


def points(line: Line) -> list[Point]:
    """The points of a run on a set."""
    found: list[Point] = []
    for way in ways_of(line.rows):
        kind = kind_of(line, way)
        if kind is None:
            continue
        x = [before(rows, way) if kind == END else vectors(rows, way) or 0.0 for rows in line.rows]
        made = line.about.get("generator")
        found.append(Point(line.documents, line.run, way, kind, made, line.seeds, tuple(x), quality(line, way)))
    return found + oracle(line)


def before(rows: Sequence[Row], way: str) -> float:
    """Tokens of text before a tail, of a segment."""
    segments = max((len(said.written) for said in rows[0].ways.values()), default=1)
    return float(np.mean([row.ways[way].held for row in rows])) / max(segments, 1)


def oracle(line: Line) -> list[Point]:
    """Of each document the fixed length with the least nats + beta N, for several beta: a bound, not a method.

    Where a context is a single segment, so that this is its oracle length; no document is read again.
    """
    ways = [way for way in ways_of(line.rows) if way.startswith("n = ")]
    if len(ways) < 2 or any(len(row.ways[ways[0]].written) > 1 for row in line.rows[0]):
        return []
    found, made = dict[float, Point](), line.about.get("generator")
    for beta in PRICES:
        best = [[cheapest(row, ways, beta) for row in rows] for rows in line.rows]
        x = tuple(vectors_of(rows, chosen) for rows, chosen in zip(line.rows, best, strict=True))
        every = {way: quality(line, way) for way in ways}
        scores = np.array([[every[way][r, d] for d, way in enumerate(chosen)] for r, chosen in enumerate(best)])
        found.setdefault(
            round(float(np.mean(x)), 2),
            Point(line.documents, line.run, f"beta {beta:.2g}", ORACLE, made, line.seeds, x, scores),
        )
    return sorted(found.values(), key=lambda point: point.at)


def cheapest(row: Row, ways: Sequence[str], beta: float) -> str:
    """The way with the least nats + beta N, the first of two alike."""
    return min(ways, key=lambda way: sum(row.ways[way].nats) + beta * sum(row.ways[way].written))


def vectors_of(rows: Sequence[Row], chosen: Sequence[str]) -> float:
    """Mean vectors of a segment where each document has a way of its own."""
    written = [n for row, way in zip(rows, chosen, strict=True) for n in row.ways[way].written]
    return sum(written) / len(written)


def interpolated(fixed: Sequence[Point], x: float, seed: int) -> Scores | None:
    """Quality [N] on the line through fixed lengths at x, document by document; None before the shortest.

    Behind the longest it is that of the longest, which has fewer vectors. `seed` is the place of a seed; runs of fewer
    seeds stand for all.
    """
    order = sorted(fixed, key=lambda point: point.x[seed % len(point.x)])
    places = [point.x[seed % len(point.x)] for point in order]
    if not places or x < places[0]:
        return None
    x = min(x, places[-1])
    i = min(max(int(np.searchsorted(places, x)), 1), len(places) - 1) if len(places) > 1 else 0
    right = order[i].scores[seed % len(order[i].scores)]
    if i == 0:
        return right
    left = order[i - 1].scores[seed % len(order[i - 1].scores)]
    span = places[i] - places[i - 1]
    share = 1.0 if span == 0 else (x - places[i - 1]) / span
    return (1 - share) * left + share * right


def error(apart: Scores, texts: Sequence[str] | None = None) -> float:
    """Standard error of a mean over seeds and documents: both vary."""
    R = len(apart)
    return math.hypot(standard_error(apart, texts), float(apart.mean(1).std(ddof=1)) / math.sqrt(R) if R > 1 else 0.0)


def verdicts(lines: Sequence[Line]) -> list[Verdict]:
    """Each learned length against its own run's fixed lengths, and against runs of its generator trained with one."""
    every = [point for line in lines for point in points(line)]
    trained = [p for p in every if p.kind == FIXED and p.way == "compressed"]
    found: list[Verdict] = []
    for point in (p for p in every if p.kind == LEARNED):
        own = [p for p in every if p.kind == FIXED and p.run == point.run]
        others = [p for p in trained if (p.documents, p.generator) == (point.documents, point.generator)]
        for name, fixed in (("its own", own), ("runs of fixed length", others)):
            on_line = [interpolated(fixed, x, seed) for seed, x in enumerate(point.x)]
            same = [scores for scores in on_line if scores is not None]
            if len(same) < len(on_line):
                continue
            apart = point.scores - np.stack(same)
            mean, se = float(apart.mean()), error(apart, point.texts)
            x, at = point.at
            helps = bool(mean > ERRORS * se)
            found.append(Verdict(point.run, point.way, name, x, at, float(np.stack(same).mean()), mean, se, helps))
    return found
