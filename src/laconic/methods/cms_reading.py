"""Vectors through the levels of a continuum memory, which are updated where their chunks end.

Nested Learning arXiv:2512.24695, section 7. Alone a layer learns by its associative objective, in `advance`. The task's
needs the loss: `answer` notes what each map reads, `cms_levels.errors` makes of a loss what `learned` takes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.core import state as values
from laconic.core.attention import wide
from laconic.core.block import rms_norm
from laconic.core.errors import Usage
from laconic.core.state import Continuum, Layer, Level
from laconic.methods.changes import chosen
from laconic.methods.chunked import accept
from laconic.methods.cms import aggregate, chain
from laconic.methods.cms_levels import (
    Notes,
    Pairs,
    Steps,
    Way,
    fired,
    fresh,
    gathered,
    mlp,
    own_errors,
    step_sizes,
)
from laconic.methods.cms_restarts import remembered, restarted
from laconic.methods.cms_shape import Params
from laconic.methods.learning_settings import Gradient
from laconic.methods.packing import alive, integers, packed, unpacked

Levels = tuple[Level, ...]
Vectors = Float[Tensor, "B T D"]


def start(params: Params, batch: int) -> Layer:
    """Nothing read: every count 0, every level at its trained start."""
    like = next(iter(params.tensors.values())).detach()
    like = like.new_zeros(1, dtype=wide(like.dtype))
    return Layer(cms=Continuum(tuple(fresh(params.shape, l, batch, like) for l in range(len(params.shape.chunks)))))


def levels_of(state: Layer) -> Levels:
    """Raises `Usage` (2) for the state of another layer."""
    if state.cms is None:
        raise Usage("cms: the state holds no levels; begin with start(params, batch)")
    return state.cms.levels


def answer(params: Params, levels: Levels, x: Vectors, notes: Notes | None = None) -> tuple[Vectors, list[Vectors]]:
    """What the levels make of vectors at their weights now, and what each of them read, level by level."""
    shape, w = params.shape, params.tensors
    inputs: dict[int, Tensor] = {}
    maps = [partial(_noted, params, l, levels[l], notes, inputs) for l in shape.order]
    if shape.options.structure == "independent":
        y = aggregate([level(x) for level in maps], w["a"][list(shape.order)])
    else:
        names = [f"levels.{l}.norm.weight" for l in shape.order]
        norms = [partial(rms_norm, weight=w[name], eps=shape.eps) if name in w else None for name in names]
        y = chain(x, maps, norms, shape.options.link)
    return y, [inputs[l] for l in range(len(levels))]


def _noted(params: Params, l: int, level: Level, notes: Notes | None, inputs: dict[int, Tensor], z: Vectors) -> Vectors:
    inputs[l] = z
    return mlp(params, l, level, notes, z)


def advance(
    params: Params,
    state: Layer,
    x: Vectors,
    *,
    live: Bool[Tensor, "B T"] | None = None,
    learn: bool = True,
    gradient: Gradient = "full",
    horizon: int | None = None,
) -> tuple[Vectors, Layer]:
    """What the levels answer to every vector, without the residual, and the state after the last.

    It learns by the associative objective; with that of the task, or `learn` False, or steps of 0, levels and their
    counts stand still. `gradient` says what of the outer loss flows through the writes, and never changes a value;
    `horizon` is in chunks, for "truncated".
    """
    accept("cms", params.shape.width, state, x, live, gradient, horizon)
    levels = levels_of(state)
    if not learn or params.shape.still or params.shape.options.inner == "task":
        return answer(params, levels, x)[0], state
    rows, way = packed(x, live), Way(gradient, horizon)
    ys: list[Tensor] = []
    made: list[Levels] = []
    groups = by_counts(levels)
    for at in groups:
        mine = rows.x[at] if len(groups) > 1 else rows.x
        few = None if rows.lengths is None else tuple(rows.lengths[row] for row in at)
        own = values.take(levels, at) if len(groups) > 1 else levels
        y, own = _aligned(params, own, mine, few, way)
        ys.append(y)
        made.append(own)
    back = torch.tensor([row for at in groups for row in at]).argsort()
    y = torch.cat(ys)[back.to(x.device)] if len(groups) > 1 else ys[0]
    levels = values.take(values.join(*made), back) if len(groups) > 1 else made[0]
    return unpacked(y, rows.order, live), replace(state, cms=Continuum(levels))


def by_counts(levels: Levels) -> list[list[int]]:
    """Rows that stand alike in the chunks of all levels, together."""
    found: dict[tuple[int, ...], list[int]] = {}
    for row, counts in enumerate(zip(*(integers(level.count) for level in levels), strict=True)):
        found.setdefault(counts, []).append(row)
    return list(found.values())


def room(params: Params, levels: Levels, row: int | None = None) -> int:
    """Tokens until the next end of a chunk, in that row or the one that is nearest to an end."""
    counts = [level.count if row is None else level.count[row] for level in levels]
    return min(C - int(count.max()) for C, count in zip(params.shape.chunks, counts, strict=True))


def _aligned(
    params: Params, levels: Levels, x: Vectors, lengths: tuple[int, ...] | None, way: Way
) -> tuple[Vectors, Levels]:
    """Rows that stand alike: piece by piece, each ending at the next boundary of any level."""
    T, most = x.shape[1], x.shape[1] if lengths is None else max(lengths)
    live, longest = alive(lengths, T, x.device), 0 if lengths is None else lengths.index(most)
    ys: list[Tensor] = []
    a = 0
    while a < most:
        b = min(most, a + room(params, levels, longest))
        y, inputs = answer(params, levels, x[:, a:b])
        ys.append(y)
        pairs = [own_errors(params, l, level, inputs[l], way) for l, level in enumerate(levels)]
        here = None if live is None else live[:, a:b]
        levels = learned(params, levels, pairs, inputs, live=here, way=way)
        a = b
    if most < T:
        ys.append(x.new_zeros(len(x), T - most, x.shape[2]))
    return torch.cat(ys, 1), levels


def learned(
    params: Params,
    levels: Levels,
    pairs: Sequence[Pairs],
    inputs: Sequence[Vectors],
    *,
    live: Bool[Tensor, "B T"] | None = None,
    way: Way | None = None,
    steps: list[Steps] | None = None,
) -> Levels:
    """The levels with T more tokens in their chunks, those that have all their tokens updated.

    `pairs` are the errors of each level and `inputs` what it read. `steps`: those by which the pairs are to be weighed.
    Raises `Usage` (2) for more tokens than the chunk has room for.
    """
    way = way or Way()
    if steps is None:
        steps = [step_sizes(params, l, z) for l, z in enumerate(inputs)]
    if live is not None:
        steps = [step * live for step in steps]
    T = inputs[0].shape[1]
    added = torch.full((len(inputs[0]),), T) if live is None else live.sum(1).cpu()
    if max(int((level.count + added).max()) - C for level, C in zip(levels, params.shape.chunks, strict=True)) > 0:
        raise Usage(
            f"cms: {T} tokens were given to learn, the chunk has room for {room(params, levels)}; cut them there"
        )
    new = [gathered(params, l, level, pairs[l], steps, way) for l, level in enumerate(levels)]
    new = [remembered(level, l, inputs[l], steps, live, way) for l, level in enumerate(new)]
    return closed(params, tuple(replace(level, count=level.count + added) for level in new), way)


def closed(params: Params, levels: Levels, way: Way) -> Levels:
    """Levels whose chunk is full are updated, and nested ones begin again where the next slower one was."""
    ended = [level.count == C for level, C in zip(levels, params.shape.chunks, strict=True)]
    found = [
        either(rows, fired(params, l, level, way), level) if bool(rows.any()) else level
        for l, (rows, level) in enumerate(zip(ended, levels, strict=True))
    ]
    for l, level in enumerate(found[:-1]):
        if level.start and bool(ended[l + 1].any()):
            found[l] = either(ended[l + 1], restarted(params, l, level, way), level)
    return tuple(found)


def either(rows: Bool[Tensor, " B"], new: Level, old: Level) -> Level:
    """`new` in those rows, `old` in the others."""
    if bool(rows.all()):
        return new
    return Level(
        {name: chosen(rows, new.moved[name], old.moved[name]) for name in old.moved},
        {name: chosen(rows, new.open[name], old.open[name]) for name in old.open},
        {
            name: torch.where(_along(rows, old.moments[name]), new.moments[name], old.moments[name])
            for name in old.moments
        },
        {name: chosen(rows, new.start[name], old.start[name]) for name in old.start},
        torch.where(rows, new.count, old.count),
        torch.where(rows, new.updates, old.updates),
        {name: chosen(rows, new.gathered[name], old.gathered[name]) for name in old.gathered},
    )


def _along(rows: Tensor, x: Tensor) -> Tensor:
    return rows.to(x.device).reshape(-1, *[1] * (x.ndim - 1))
