"""A nested level where the next slower one has fired: its start moves, and it begins there again.

Nested Learning arXiv:2512.24695, 72; symbols as in `cms.py`.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.models.attention import accumulation_dtype
from laconic.nested import state as values
from laconic.nested.cms.config import CMSParams
from laconic.nested.cms.equations import restart, update
from laconic.nested.cms.level import (
    STORED_INPUTS,
    GradientMode,
    StepSizes,
    accumulate_errors,
    apply_update,
    associative_errors,
    associative_loss,
    clear_terms,
    clip_update,
    detach_for_grad,
    init_level,
    init_stored_inputs,
    max_update_norms,
)
from laconic.nested.cms.low_rank_updates import WeightChange, add, scale, smaller_form, to_dense
from laconic.nested.state import CMSLevelState, LowRankChange


def store_inputs(
    level: CMSLevelState,
    l: int,
    z: Float[Tensor, "B T D"],
    step_sizes: list[StepSizes],
    valid: Bool[Tensor, "B T"] | None,
    gradient_mode: GradientMode,
) -> CMSLevelState:
    """The level with these tokens among what it read in the slower level's chunk, where that is read again."""
    held = level.meta_accumulated.get(STORED_INPUTS)
    if held is None:
        return level
    there = torch.ones_like(step_sizes[l]) if valid is None else valid.to(step_sizes[l])
    more = LowRankChange(z.to(accumulation_dtype(z.dtype)), torch.stack([step_sizes[l], step_sizes[l + 1], there], -1))
    more = values.detach(more) if gradient_mode.outer_gradient == "none" else more
    return replace(level, meta_accumulated={STORED_INPUTS: add(held, more)})


def meta_gradient(
    params: CMSParams, l: int, level: CMSLevelState, gradient_mode: GradientMode
) -> dict[str, WeightChange]:
    """Eq. 72: the gradient, by a start, of the level's losses over the slower chunk, weighed by the slower steps.

    The chunk is read again from the start, so that the gradient passes through every update made in it. The slower
    steps keep theirs in every way of gradients but "none".
    """
    shape, read, again = params.shape, level.meta_accumulated[STORED_INPUTS], torch.is_grad_enabled()
    assert isinstance(read, LowRankChange)
    C, N, keep = (
        shape.chunk_sizes[l],
        shape.chunk_sizes[l + 1],
        identity if gradient_mode.is_differentiable else detach_for_grad,
    )
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(read.left.device.type, enabled=False):
        order = torch.sort(read.right[..., 2] == 0, dim=1, stable=True).indices[:, :N, None]
        z = keep(read.left).gather(1, order.expand(-1, -1, shape.width))
        own, slower = (read.right[..., n : n + 1].gather(1, order)[..., 0] for n in (0, 1))
        own = keep(own)
        inner = CMSParams(shape, {name: keep(w).to(z.dtype) for name, w in params.weights.items()})
        start = {name: keep(to_dense(change)) for name, change in level.start_change.items()}
        start = {name: x if x.requires_grad else detach_for_grad(x).requires_grad_() for name, x in start.items()}
        now = replace(init_level(shape, l, len(z), z.detach()), change=start, meta_accumulated={})
        total = z.new_zeros(())
        for a in range(0, N, C):
            piece, through = z[:, a : a + C], GradientMode()
            total = total + (slower[:, a : a + C] * associative_loss(inner, l, now, piece)).sum()
            if a + C < N:
                pairs = associative_errors(inner, l, now, piece, through)
                now = apply_update(
                    inner, l, accumulate_errors(inner, l, now, pairs, [own[:, a : a + C]] * (l + 1), through), through
                )
        slopes = torch.autograd.grad(total, list(start.values()), create_graph=again)
    return dict(zip(start, slopes, strict=True))


def identity(x: Tensor) -> Tensor:
    """The same, its graph and all."""
    return x


def reset_to_start(params: CMSParams, l: int, level: CMSLevelState, gradient_mode: GradientMode) -> CMSLevelState:
    """A nested level where the next slower one has fired: its start moves, and it begins there again."""
    shape, C = params.shape, params.shape.chunk_sizes[l + 1]
    start: dict[str, WeightChange] = dict(level.start_change)
    most = max_update_norms(params, l) if shape.options.max_update_ratio else {}
    terms = (
        meta_gradient(params, l, level, gradient_mode)
        if shape.options.meta_gradient == "full"
        else level.meta_accumulated
    )
    for name in start:
        if shape.options.meta_gradient in ("first_order", "full"):
            start[name] = smaller_form(update(start[name], clip_update(terms[name], most.get(name)), C, C))
        elif shape.options.meta_gradient == "reptile":
            way_to = add(level.change[name], scale(start[name], -1.0))
            start[name] = smaller_form(add(start[name], scale(way_to, shape.options.reptile_rate)))
    if gradient_mode.outer_gradient == "none":
        start = values.detach(start)
    read = level.meta_accumulated.get(STORED_INPUTS)
    if isinstance(read, LowRankChange):
        none = init_stored_inputs(shape, len(read.left), read.left.detach())
    else:
        none = clear_terms(level.meta_accumulated, shape)
    moved = {name: restart(level.change[name], start[name], C, C) for name in shape.projections}
    moments = {name: torch.zeros_like(m) for name, m in level.moments.items()}
    return replace(level, change=moved, moments=moments, start_change=start, meta_accumulated=none)
