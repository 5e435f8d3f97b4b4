"""What each way of a context is worth: perplexity by context (E1), and of excerpts copied from it (E1x).

Symbols: R seeds, N documents; nats are per scored token of a document, and documents count alike.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.scored import WIDTH, Row
from laconic.evaluation.statistics import Estimate, Scores

Seeds = Sequence[Sequence[Row]]
ERRORS = 2  # standard errors by which something has to be more than nothing
TEXTS = 10  # of which documents are stretches, from which on errors are over texts
TUNED = "full-tuned"  # the whole text, read by a plain model that was trained as long, beside
UNTRAINED = "untrained"  # ways of the method before a step, which are measured against each other


class Worth(NamedTuple):
    """A way over its seeds: nats per scored token, what it saves against no context, paired, and its standard error.

    `share` is that of what the whole text saves, None where that is not shown to save anything; `late` the same saving
    without a tail's first `WIDTH` positions. `vectors` are the mean of a segment (None where the context is text),
    `held` those, or tokens, that stand before a tail.
    """

    way: str
    nats: Estimate
    right: Estimate
    gain: Estimate
    se: float
    share: float | None
    late: Estimate | None
    vectors: float | None
    held: float


def column(seeds: Seeds, way: str, start: int = 0) -> Scores:
    """Nats per scored token of each document, [R, N], from the `start`-th `WIDTH` positions of a tail on."""
    return np.array([[sum(r.ways[way].nats[start:]) / sum(r.scored[start:]) for r in rows] for rows in seeds])


def rights(seeds: Seeds, way: str) -> Scores:
    """Share of the scored tokens that came out right, [R, N]."""
    return np.array([[row.ways[way].right / sum(row.scored) for row in rows] for rows in seeds])


def vectors(rows: Sequence[Row], way: str) -> float | None:
    """Mean vectors of a segment; None where there are none."""
    written = [n for row in rows for n in row.ways[way].written]
    return sum(written) / len(written) if written else None


def groups(names: Sequence[str]) -> list[str] | None:
    """The text that each document is a stretch of; None, each by itself, where there are too few texts for errors."""
    found = [name.split("@")[0] for name in names]
    return found if len(set(found)) >= TEXTS else None


def standard_error(apart: Scores, groups: Sequence[str] | None = None) -> float:
    """Of the mean over documents of what is first averaged over seeds; documents of one group are not independent.

    Of groups g with sums d_g of deviations from the mean it is sqrt(G / (G - 1) sum over g of d_g^2) / N.
    """
    each = apart.mean(0)
    _, at = np.unique(np.arange(len(each)) if groups is None else np.array(groups), return_inverse=True)
    sums = np.bincount(at, each - each.mean())
    G = len(sums)
    return float(np.sqrt(G / (G - 1) * (sums**2).sum()) / len(each)) if G > 1 else float("nan")


def worth(seeds: Seeds, way: str, whole: str | None) -> Worth:
    """What a way is worth; `whole` is the way in which all of the text is read."""
    base = f"{UNTRAINED} none" if way.startswith(UNTRAINED) else "none"
    nothing, here = column(seeds, base), column(seeds, way)
    apart = nothing - here
    texts = groups([row.id for row in seeds[0]])
    most = None if whole is None or base != "none" else nothing - column(seeds, whole)
    there = most is not None and float(most.mean()) > ERRORS * standard_error(most, texts)
    late = all(sum(row.scored[1:]) for row in seeds[0])
    counts = [n for n in (vectors(rows, way) for rows in seeds) if n is not None]
    return Worth(
        way,
        statistics.estimate(here),
        statistics.share(rights(seeds, way)),
        statistics.estimate(apart),
        standard_error(apart, texts),
        float(apart.mean() / most.mean()) if most is not None and there else None,
        statistics.estimate(column(seeds, base, 1) - column(seeds, way, 1)) if late else None,
        float(np.mean(counts)) if counts else None,
        float(np.mean([[row.ways[way].held for row in rows] for rows in seeds])),
    )


def with_control(seeds: Seeds, control: Seeds) -> list[list[Row]]:
    """The same documents, each with the way in which a plain model reads all of its text behind those of the run.

    Where the control has fewer seeds, they stand for all.
    """
    return [
        [row._replace(ways={**row.ways, TUNED: beside.ways["full"]}) for row, beside in zip(rows, there, strict=True)]
        for rows, there in zip(seeds, cycle(control), strict=False)
    ]


def curve(seeds: Seeds, way: str) -> list[float]:
    """Nats per token of each `WIDTH` positions of the tail."""
    nats = np.array([[row.ways[way].nats for row in rows] for rows in seeds]).sum((0, 1))
    counts = np.array([[row.scored for row in rows] for rows in seeds]).sum((0, 1))
    return (nats / np.maximum(counts, 1)).tolist()


def ways_of(seeds: Seeds) -> list[str]:
    """The ways that every document of every seed was read in, in their order."""
    first = seeds[0][0].ways
    return [name for name in first if all(name in row.ways for rows in seeds for row in rows)]


def table(seeds: Seeds) -> list[Worth]:
    """Every way; of recall without shares, since facts as text are what no reader of vectors was taught to read."""
    ways = ways_of(seeds)
    whole = "full" if "full" in ways and seeds[0][0].facts is None else None
    return [worth(seeds, way, whole) for way in ways]


def plain(found: Worth) -> dict[str, Any]:
    """A way's figures as JSON holds them."""
    held = found._asdict()
    return {k: v._asdict() if isinstance(v, Estimate) else v for k, v in held.items()} | {
        "perplexity": float(np.exp(found.nats.mean)),
        "curve_width": WIDTH,
    }


def stated(found: Any) -> Any:
    """Figures as JSON can hold them: None for what is no number, as the standard error of one document alone."""
    if isinstance(found, dict):
        return {key: stated(x) for key, x in found.items()}
    if isinstance(found, list | tuple):
        return [stated(x) for x in found]
    return None if isinstance(found, float) and np.isnan(found) else found
