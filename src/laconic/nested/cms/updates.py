"""Updates of a CMS level: accumulate the errors of a chunk, apply them at its end, restart nested levels.

Nested Learning arXiv:2512.24695, Eqs. 71 and 72; symbols as in `level.py`; e_t the gradient of token t's inner loss
by theta; i valid tokens read, from 1.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.models.attention import accumulation_dtype
from laconic.nested.cms.level import (
    MIN_SQUARED_NORM,
    STORED_INPUTS,
    CMSParams,
    CMSShape,
    ErrorPairs,
    GradientMode,
    StepSizes,
    WeightChange,
    add,
    associative_errors,
    associative_loss,
    detach_for_grad,
    frobenius_norm,
    init_level,
    init_stored_inputs,
    scale,
    smaller_form,
    start_weight,
    to_dense,
    zero_change,
)
from laconic.nested.optim.dgd_equations import dgd_joint
from laconic.nested.optim.m3_equations import delta_momentum, momentum, newton_schulz
from laconic.nested.state import CMSLevelState, LowRankChange, detach, where_rows

LevelStates = tuple[CMSLevelState, ...]


def update(change: WeightChange, terms: WeightChange) -> WeightChange:
    """Eq. 71: theta_{i+1} = theta_i - sum over t = i-C+1 .. i of step_t e_t, where C divides i.

    `terms` is the sum over exactly C tokens, all at the weights at the start of the chunk.
    """
    return add(change, scale(terms, -1.0))


def scale_by_step(pair: LowRankChange, step_size: StepSizes, unit_inputs: bool) -> LowRankChange:
    """Return step_t delta_t x_tᵀ as factors.

    With `unit_inputs`, for DGD, inputs have length 1 and both factors carry the root of the step size.
    """
    if not unit_inputs:
        return LowRankChange(pair.left * step_size[..., None], pair.right)
    norm = pair.right.square().sum(-1, keepdim=True).clamp(min=MIN_SQUARED_NORM).sqrt()
    root = (torch.where(step_size > 0, step_size, 1).sqrt() * (step_size > 0))[..., None]  # its slope is infinite at 0
    return LowRankChange(pair.left * norm * root, pair.right / norm * root)


def accumulate_errors(
    params: CMSParams,
    l: int,
    level: CMSLevelState,
    errors: ErrorPairs,
    step_sizes: list[StepSizes],
) -> CMSLevelState:
    """Add the tokens' terms to the open chunk; `step_sizes`, by level, are 0 for a token that is not valid."""
    step_size = step_sizes[l]
    is_dgd = params.shape.options.inner_optimizer == "dgd"
    terms = {name: scale_by_step(pair, step_size, is_dgd) for name, pair in errors.items()}
    meta_names = [name for name in level.meta_accumulated if name in errors]
    meta_terms = {name: scale_by_step(errors[name], step_sizes[l + 1], False) for name in meta_names}
    moments = dict(level.moments)
    if "step" in moments:  # Muon normalizes the sum of the terms, so it needs the step sizes apart
        moments["step"] = moments["step"] + step_size.sum(1)
    accumulated = {name: add(level.accumulated[name], more) for name, more in terms.items()}
    if not is_dgd:  # which needs the pairs themselves
        accumulated = {name: smaller_form(change) for name, change in accumulated.items()}
    meta = {name: smaller_form(add(level.meta_accumulated[name], more)) for name, more in meta_terms.items()}
    meta = {**level.meta_accumulated, **meta}
    return replace(level, accumulated=accumulated, meta_accumulated=meta, moments=moments)


def inner_optimizer_step(
    params: CMSParams, l: int, name: str, level: CMSLevelState
) -> tuple[WeightChange, dict[str, Tensor]]:
    """Return what the inner optimizer subtracts from a map at the end of a chunk, and its new moments."""
    o = params.shape.options
    terms = level.accumulated[name]
    moments: dict[str, Tensor] = {}
    if o.inner_optimizer == "dgd":
        assert isinstance(terms, LowRankChange)
        W = to_dense(level.change[name]) + start_weight(params, l, name)
        return W - dgd_joint(W, terms.right, terms.left, 1.0, reduction="sum"), moments
    if o.inner_optimizer == "gd":
        return terms, moments
    m, g = level.moments[name], to_dense(terms)
    if o.inner_optimizer == "delta_momentum":
        moments[name] = delta_momentum(m, g, o.inner_momentum, 1.0)
    else:
        moments[name] = momentum(torch.zeros_like(m), m, g, o.inner_momentum, 1.0)[1]
    if o.inner_optimizer == "muon":
        return -level.moments["step"][:, None, None] * newton_schulz(moments[name]), moments
    return -moments[name], moments


def max_update_norms(params: CMSParams, l: int) -> dict[str, Tensor]:
    """Return the largest norm of an update of every map, a share of its start's.

    A map that starts at zero is measured by the root mean square of the whole level's start.
    """
    starts = {name: start_weight(params, l, name) for name in params.shape.projections}
    squared = {name: torch.dot(W.flatten(), W.flatten()) for name, W in starts.items()}
    mean = torch.stack(list(squared.values())).sum() / sum(W.numel() for W in starts.values())
    ratio = params.shape.options.max_update_ratio
    return {
        name: ratio * torch.where(square > 0, square, mean * starts[name].numel()).clamp(min=MIN_SQUARED_NORM).sqrt()
        for name, square in squared.items()
    }


def clip_update(terms: WeightChange, max_norm: Tensor | None) -> WeightChange:
    return terms if max_norm is None else scale(terms, (max_norm / frobenius_norm(terms)).clamp(max=1))


def apply_update(params: CMSParams, l: int, level: CMSLevelState, gradient_mode: GradientMode) -> CMSLevelState:
    """Update a level at the end of its chunk, in all rows."""
    shape = params.shape
    max_norms = max_update_norms(params, l) if shape.options.max_update_ratio else {}
    changes: dict[str, WeightChange] = {}
    moments: dict[str, Tensor] = {}
    for name in shape.projections:
        terms, new_moments = inner_optimizer_step(params, l, name, level)
        moments |= new_moments
        changes[name] = smaller_form(update(level.change[name], clip_update(terms, max_norms.get(name))))
    if "step" in level.moments:
        moments["step"] = torch.zeros_like(level.moments["step"])
    new = replace(
        level,
        change=changes,
        moments=moments,
        accumulated=clear_terms(level.accumulated, shape),
        num_tokens=torch.zeros_like(level.num_tokens),
        num_updates=level.num_updates + 1,
    )
    if gradient_mode.truncate_after is None:
        return new
    is_cut = new.num_updates % gradient_mode.truncate_after == 0
    return where_rows(is_cut, detach(new), new) if bool(is_cut.any()) else new


def clear_terms(terms: Mapping[str, WeightChange], shape: CMSShape) -> dict[str, WeightChange]:
    likes = {name: change.left if isinstance(change, LowRankChange) else change for name, change in terms.items()}
    return {name: zero_change(len(x), *shape.projection_shape(name), x.detach()) for name, x in likes.items()}


def store_inputs(
    level: CMSLevelState,
    l: int,
    z: Float[Tensor, "B T D"],
    step_sizes: list[StepSizes],
    valid: Bool[Tensor, "B T"] | None,
) -> CMSLevelState:
    """Store the tokens of the slower level's chunk, if `meta_gradient` reads them again; see `init_stored_inputs`."""
    stored = level.meta_accumulated.get(STORED_INPUTS)
    if stored is None:
        return level
    is_valid = torch.ones_like(step_sizes[l]) if valid is None else valid.to(step_sizes[l])
    columns = torch.stack([step_sizes[l], step_sizes[l + 1], is_valid], -1)
    new = LowRankChange(z.to(accumulation_dtype(z.dtype)), columns)
    return replace(level, meta_accumulated={STORED_INPUTS: add(stored, new)})


def meta_gradient(
    params: CMSParams, l: int, level: CMSLevelState, gradient_mode: GradientMode
) -> dict[str, WeightChange]:
    """Eq. 72: the gradient, by a start, of the level's losses over the slower chunk, weighted by the slower steps.

    The chunk is read again from the start, so that the gradient passes through every update made in it. The slower
    step sizes keep their gradient in every mode.
    """
    shape = params.shape
    create_graph = torch.is_grad_enabled()
    stored = level.meta_accumulated[STORED_INPUTS]
    assert isinstance(stored, LowRankChange)
    C, N = shape.chunk_sizes[l], shape.chunk_sizes[l + 1]
    is_graph_needed = gradient_mode.is_differentiable

    def keep(x: Tensor) -> Tensor:
        return x if is_graph_needed else detach_for_grad(x)

    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(stored.left.device.type, enabled=False):
        order = torch.sort(stored.right[..., 2] == 0, dim=1, stable=True).indices[:, :N, None]  # the N valid tokens
        z = keep(stored.left).gather(1, order.expand(-1, -1, shape.width))
        steps, slower_steps = (stored.right[..., n : n + 1].gather(1, order)[..., 0] for n in (0, 1))
        steps = keep(steps)
        inner_params = CMSParams(shape, {name: keep(w).to(z.dtype) for name, w in params.weights.items()})
        start = {name: keep(to_dense(change)) for name, change in level.start_change.items()}
        # Recorded inputs and step sizes may depend on the start too; a copy of it leaves those paths out.
        start = {
            name: x.clone() if x.requires_grad else detach_for_grad(x).requires_grad_() for name, x in start.items()
        }
        now = replace(init_level(shape, l, len(z), z.detach()), change=start, meta_accumulated={})
        total = z.new_zeros(())
        for a in range(0, N, C):
            chunk = z[:, a : a + C]
            chunk_steps = [steps[:, a : a + C]] * (l + 1)  # by level; only the last one, that of level l, is read
            total = total + (slower_steps[:, a : a + C] * associative_loss(inner_params, l, now, chunk)).sum()
            if a + C < N:
                errors = associative_errors(inner_params, l, now, chunk, GradientMode())
                now = accumulate_errors(inner_params, l, now, errors, chunk_steps)
                now = apply_update(inner_params, l, now, GradientMode())
        gradients = torch.autograd.grad(total, list(start.values()), create_graph=create_graph)
    return dict(zip(start, gradients, strict=True))


def reset_to_start(params: CMSParams, l: int, level: CMSLevelState, gradient_mode: GradientMode) -> CMSLevelState:
    """Eq. 72: where the chunk of the next slower level ends, the start of a nested level moves, and it begins there."""
    shape = params.shape
    o = shape.options
    start = dict[str, WeightChange](level.start_change)
    max_norms = max_update_norms(params, l) if o.max_update_ratio else {}
    terms = meta_gradient(params, l, level, gradient_mode) if o.meta_gradient == "full" else level.meta_accumulated
    for name in start:
        if o.meta_gradient in ("first_order", "full"):
            start[name] = smaller_form(update(start[name], clip_update(terms[name], max_norms.get(name))))
        elif o.meta_gradient == "reptile":
            difference = add(level.change[name], scale(start[name], -1.0))
            start[name] = smaller_form(add(start[name], scale(difference, o.reptile_rate)))
    stored = level.meta_accumulated.get(STORED_INPUTS)
    if isinstance(stored, LowRankChange):
        cleared = init_stored_inputs(shape, len(stored.left), stored.left.detach())
    else:
        cleared = clear_terms(level.meta_accumulated, shape)
    return replace(
        level,
        change=start,
        moments={name: torch.zeros_like(m) for name, m in level.moments.items()},
        start_change=start,
        meta_accumulated=cleared,
    )


def update_full_levels(params: CMSParams, levels: LevelStates, gradient_mode: GradientMode) -> LevelStates:
    """Update the levels whose chunk is complete, and restart nested levels whose next slower one was."""
    ended = [level.num_tokens == C for level, C in zip(levels, params.shape.chunk_sizes, strict=True)]
    new = [
        where_rows(rows, apply_update(params, l, level, gradient_mode), level) if bool(rows.any()) else level
        for l, (rows, level) in enumerate(zip(ended, levels, strict=True))
    ]
    for l, level in enumerate(new[:-1]):
        if level.start_change and bool(ended[l + 1].any()):
            new[l] = where_rows(ended[l + 1], reset_to_start(params, l, level, gradient_mode), level)
    return tuple(new)
