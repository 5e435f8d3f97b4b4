"""A nested level where the next slower one has fired: its start moves, and it begins there again.

Nested Learning arXiv:2512.24695, 72; symbols as in `cms.py`.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.core import state as values
from laconic.core.attention import wide
from laconic.core.state import Factors, Level
from laconic.methods.changes import Change, dense, folded, plus, times
from laconic.methods.cms import restart, update
from laconic.methods.cms_levels import (
    READ,
    Steps,
    Way,
    bounds,
    clipped,
    cut,
    emptied,
    fired,
    fresh,
    gathered,
    missed,
    own_errors,
    unread,
)
from laconic.methods.cms_shape import Params


def remembered(
    level: Level, l: int, z: Float[Tensor, "B T D"], steps: list[Steps], live: Bool[Tensor, "B T"] | None, way: Way
) -> Level:
    """The level with these tokens among what it read in the slower level's chunk, where that is read again."""
    held = level.gathered.get(READ)
    if held is None:
        return level
    there = torch.ones_like(steps[l]) if live is None else live.to(steps[l])
    more = Factors(z.to(wide(z.dtype)), torch.stack([steps[l], steps[l + 1], there], -1))
    more = values.detach(more) if way.gradient == "none" else more
    return replace(level, gathered={READ: plus(held, more)})


def through_updates(params: Params, l: int, level: Level, way: Way) -> dict[str, Change]:
    """Eq. 72: the gradient, by a start, of the level's losses over the slower chunk, weighed by the slower steps.

    The chunk is read again from the start, so that the gradient passes through every update made in it. The slower
    steps keep theirs in every way of gradients but "none".
    """
    shape, read, again = params.shape, level.gathered[READ], torch.is_grad_enabled()
    assert isinstance(read, Factors)
    C, N, keep = shape.chunks[l], shape.chunks[l + 1], kept if way.through else cut
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(read.left.device.type, enabled=False):
        order = torch.sort(read.right[..., 2] == 0, dim=1, stable=True).indices[:, :N, None]
        z = keep(read.left).gather(1, order.expand(-1, -1, shape.width))
        own, slower = (read.right[..., n : n + 1].gather(1, order)[..., 0] for n in (0, 1))
        own = keep(own)
        inner = Params(shape, {name: keep(w).to(z.dtype) for name, w in params.tensors.items()})
        start = {name: keep(dense(change)) for name, change in level.start.items()}
        start = {name: x if x.requires_grad else cut(x).requires_grad_() for name, x in start.items()}
        now = replace(fresh(shape, l, len(z), z.detach()), moved=start, gathered={})
        total = z.new_zeros(())
        for a in range(0, N, C):
            piece, through = z[:, a : a + C], Way()
            total = total + (slower[:, a : a + C] * missed(inner, l, now, piece)).sum()
            if a + C < N:
                pairs = own_errors(inner, l, now, piece, through)
                now = fired(inner, l, gathered(inner, l, now, pairs, [own[:, a : a + C]] * (l + 1), through), through)
        slopes = torch.autograd.grad(total, list(start.values()), create_graph=again)
    return dict(zip(start, slopes, strict=True))


def kept(x: Tensor) -> Tensor:
    """The same, its graph and all."""
    return x


def restarted(params: Params, l: int, level: Level, way: Way) -> Level:
    """A nested level where the next slower one has fired: its start moves, and it begins there again."""
    shape, C = params.shape, params.shape.chunks[l + 1]
    start: dict[str, Change] = dict(level.start)
    most = bounds(params, l) if shape.options.clip else {}
    terms = through_updates(params, l, level, way) if shape.options.meta == "full" else level.gathered
    for name in start:
        if shape.options.meta in ("first_order", "full"):
            start[name] = folded(update(start[name], clipped(terms[name], most.get(name)), C, C))
        elif shape.options.meta == "reptile":
            way_to = plus(level.moved[name], times(start[name], -1.0))
            start[name] = folded(plus(start[name], times(way_to, shape.options.share)))
    if way.gradient == "none":
        start = values.detach(start)
    read = level.gathered.get(READ)
    if isinstance(read, Factors):
        none = unread(shape, len(read.left), read.left.detach())
    else:
        none = emptied(level.gathered, shape)
    moved = {name: restart(level.moved[name], start[name], C, C) for name in shape.maps}
    moments = {name: torch.zeros_like(m) for name, m in level.moments.items()}
    return replace(level, moved=moved, moments=moments, start=start, gathered=none)
