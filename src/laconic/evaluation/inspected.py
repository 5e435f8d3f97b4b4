"""What inspection found as one HTML page that asks for nothing, and is read without script."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from laconic.evaluation import grids, statistics
from laconic.evaluation.findings import (
    AGAINST,
    Question,
    Questions,
    changes,
    figures,
    limits,
    pass_names,
    verdict,
    words_of,
)
from laconic.evaluation.looked import Effect, Looked
from laconic.evaluation.pages import template
from laconic.evaluation.report import interval, percent
from laconic.evaluation.similarity import SPACES, Map
from laconic.evaluation.statistics import Estimate
from laconic.evaluation.survey import Answered, Survey

Scale = tuple[float, float]
ABOUT = {
    "zero": "zeros in their place",
    "mean": "each slot's mean over other questions",
    "shuffle": "the slots of the question change places",
    "swap": "the thoughts on another question",
    "noise": "Gaussian vectors of equal norm",
}


def page(found: Question | Questions) -> str:
    """The whole file."""
    filters = {"percent": percent, "points": statistics.points, "shown": grids.shown}
    one = isinstance(found, Question)
    return template("inspected.html", **filters).render(
        one=one, f=found, about=ABOUT, interval=interval, notes=found.notes if one else limits(found),
        **(drawn_question(found) if one else drawn_set(found)),
    )  # fmt: skip


def drawn_question(found: Question) -> dict[str, Any]:
    """What the page shows of one question, beside its facts."""
    return {
        "passes": [list(zip(pass_names(side), side.words.passes, strict=True)) for side in found.sides],
        "verdicts": [verdict(side.answer, found) for side in found.sides],
        "maps": [
            (what, AGAINST[against], compared([(side, side.map(what, against)) for side in found.sides], found.chain))
            for against in AGAINST
            for what in SPACES
            if any(side.map(what, against) for side in found.sides)
        ],
        "kept": [kept(side, found.chain) for side in found.sides if side.selections],
        "alone": [(side, by_slot(side.alone)) for side in found.sides],
    }


class Figure(NamedTuple):
    """A map of one run as drawn: the mean over layers, and each layer."""

    name: str
    map: Map
    mean: Any
    layers: list[tuple[int, bool, Any]]


def compared(maps: Sequence[tuple[Looked, Map | None]], chain: Sequence[str]) -> tuple[list[Figure], Scale]:
    """The same map of several runs on one scale, and that scale."""
    there = [(side, map) for side, map in maps if map is not None]
    scale = grids.bounds([map.mean for _, map in there])
    figures_: list[Figure] = []
    for side, map in there:
        columns = chain if map.against == "chain" else [str(i + 1) for i in range(len(map.mean[0]))]
        down = [str(m + 1) for m in range(len(map.mean))]
        text = f"{side.name}: cosines of slots (down) with {map.against} (across), {strongest(map.mean, columns)}"
        mean = grids.grid(map.mean, down, columns, scale, text, best=True)
        layers = [
            (l, l in side.matched, grids.grid(layer, down, columns, grids.bounds([layer]), f"{side.name}, layer {l}"))
            for l, layer in enumerate(map.layers)
        ]
        figures_.append(Figure(side.name, map, mean, layers))
    return figures_, scale


def strongest(map: Sequence[Sequence[float]], columns: Sequence[str]) -> str:
    """The likest column of every slot, in words."""
    best = [max(range(len(row)), key=row.__getitem__) for row in map]
    return "likest: " + ", ".join(f"{m + 1} {columns[i]} {map[m][i]:.2f}" for m, i in enumerate(best))


class Keeps(NamedTuple):
    """What selectors keep of one chain, as drawn."""

    side: Looked
    whole: bool
    shares: Any
    classes: list[tuple[str, list[float]]]
    kinds: list[str]
    heads: list[tuple[str, Any]]
    scores: list[tuple[str, Any]]


def kept(side: Looked, chain: Sequence[str]) -> Keeps:
    """The shares of layers and heads that keep each token; each head; and the scores behind the run's own choice."""
    heads = [f"{l}.{g}" for l in side.matched for g in range(side.selections[0].held.shape[1])]
    names = [each.name for each in side.selections]
    shares = [each.shares for each in side.selections]
    text = "share of layers and heads that keep each chain token, by selector"
    kinds, tokens = list(dict.fromkeys(side.kinds)), np.array(side.kinds)
    return Keeps(
        side,
        bool(side.selections[0].held.all()),
        grids.grid(shares, names, chain, (0.0, 1.0), text),
        [(each.name, [float(each.held[..., tokens == kind].mean()) for kind in kinds]) for each in side.selections],
        kinds,
        [
            (
                each.name,
                grids.grid(flat(each.held), heads, chain, (0.0, 1.0), f"kept by {each.name}, layer.head by token"),
            )
            for each in side.selections
        ],
        [
            (name, grids.grid(rows, heads, chain, grids.bounds([rows]), f"{name} of each token, layer.head by token"))
            for name, rows in zip("IRS", side.scores or (), strict=False)
        ],
    )


def flat(held: NDArray[np.bool_]) -> list[list[float]]:
    """Layers and heads as rows."""
    return held.reshape(-1, held.shape[2]).astype(float).tolist()


def by_slot(effects: Sequence[Effect]) -> Mapping[str, list[Effect]]:
    """Effects on single slots by what was done."""
    return {kind: each for kind in ABOUT if (each := [e for e in effects if e.intervention.kind == kind])}


def drawn_set(found: Questions) -> dict[str, Any]:
    """What the page shows of a set, beside its facts."""
    first = found.sides[0]
    rows = [changes(side, None if side is first else first, found.protocol) for side in found.sides]
    near = sorted({key for side in found.sides for key in side.near}, key=lambda key: SPACES.index(key[0]))
    return {
        "base": [statistics.share(side.plain.right) for side in found.sides],
        "rows": rows,
        "swaps": [next((c for c in each if c.intervention[:2] == ("swap", "vectors")), None) for each in rows],
        "swept": [swept(side.swept) for side in found.sides],
        "tried": sorted({n for side in found.sides for n in side.swept}),
        "read": [words_of(side) for side in found.sides],
        "likeness": [figures(side) for side in found.sides],
        "near": [(what, *mean_maps(found.sides, (what, against))) for what, against in near],
    }


def swept(answered: Mapping[int, Answered]) -> dict[int, Estimate]:
    """Accuracy by test-time rounds."""
    return {n: statistics.share(each.right) for n, each in answered.items()}


def mean_maps(sides: Sequence[Survey], key: tuple[str, str]) -> tuple[list[tuple[str, Any]], Scale]:
    """A mean map of every run that has it, on one scale."""
    there = [(side, side.near[key].tolist()) for side in sides if key in side.near]
    scale = grids.bounds([map for _, map in there])
    drawn: list[tuple[str, Any]] = []
    for side, map in there:
        labels = [str(m + 1) for m in range(len(map))]
        text = f"{side.name}: mean cosines of slots (down) with kept tokens (across), {strongest(map, labels)}"
        drawn.append((side.name, grids.grid(map, labels, labels, scale, text, best=True)))
    return drawn, scale
