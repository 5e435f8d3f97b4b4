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

from laconic.config.nested import OuterGradient
from laconic.errors import UsageError
from laconic.models.attention import accumulation_dtype
from laconic.models.block import rms_norm
from laconic.nested import state as values
from laconic.nested.cms.cms_restarts import reset_to_start, store_inputs
from laconic.nested.cms.config import CMSParams
from laconic.nested.cms.equations import aggregate, chain
from laconic.nested.cms.level import (
    ErrorPairs,
    GradientMode,
    LinearRecords,
    StepSizes,
    accumulate_errors,
    apply_update,
    associative_errors,
    compute_step_sizes,
    init_level,
    level_mlp,
)
from laconic.nested.cms.low_rank_updates import where_rows
from laconic.nested.recurrence.chunked_scan import check_inputs
from laconic.nested.recurrence.packing import build_valid_mask, pack_left, to_ints, unpack
from laconic.nested.state import CMSLevelState, CMSState, LayerState

LevelStates = tuple[CMSLevelState, ...]
Vectors = Float[Tensor, "B T D"]


def initial_state(params: CMSParams, batch_size: int) -> LayerState:
    """Nothing read: every count 0, every level at its trained start."""
    like = next(iter(params.weights.values())).detach()
    like = like.new_zeros(1, dtype=accumulation_dtype(like.dtype))
    return LayerState(
        cms=CMSState(tuple(init_level(params.shape, l, batch_size, like) for l in range(len(params.shape.chunk_sizes))))
    )


def require_levels(state: LayerState) -> LevelStates:
    """Raises `Usage` (2) for the state of another layer."""
    if state.cms is None:
        raise UsageError("cms: the state holds no levels; begin with start(params, batch)")
    return state.cms.levels


def forward_levels(
    params: CMSParams, levels: LevelStates, x: Vectors, records: LinearRecords | None = None
) -> tuple[Vectors, list[Vectors]]:
    """What the levels make of vectors at their weights now, and what each of them read, level by level."""
    shape, w = params.shape, params.weights
    inputs: dict[int, Tensor] = {}
    maps = [partial(_noted, params, l, levels[l], records, inputs) for l in shape.run_order]
    if shape.options.structure == "independent":
        y = aggregate([level(x) for level in maps], w["a"][list(shape.run_order)])
    else:
        names = [f"levels.{l}.norm.weight" for l in shape.run_order]
        norms = [partial(rms_norm, weight=w[name], eps=shape.eps) if name in w else None for name in names]
        y = chain(x, maps, norms, shape.options.residual)
    return y, [inputs[l] for l in range(len(levels))]


def _noted(
    params: CMSParams, l: int, level: CMSLevelState, notes: LinearRecords | None, inputs: dict[int, Tensor], z: Vectors
) -> Vectors:
    inputs[l] = z
    return level_mlp(params, l, level, notes, z)


def forward_with_state(
    params: CMSParams,
    state: LayerState,
    x: Vectors,
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    update_weights: bool = True,
    outer_gradient: OuterGradient = "full",
    truncate_after: int | None = None,
) -> tuple[Vectors, LayerState]:
    """What the levels answer to every vector, without the residual, and the state after the last.

    It learns by the associative objective; with that of the task, or `learn` False, or steps of 0, levels and their
    counts stand still. `gradient` says what of the outer loss flows through the writes, and never changes a value;
    `horizon` is in chunks, for "truncated".
    """
    check_inputs("cms", params.shape.width, state, x, attention_mask, outer_gradient, truncate_after)
    levels = require_levels(state)
    if not update_weights or params.shape.is_frozen or params.shape.options.inner_objective == "task":
        return forward_levels(params, levels, x)[0], state
    rows, way = pack_left(x, attention_mask), GradientMode(outer_gradient, truncate_after)
    ys: list[Tensor] = []
    made: list[LevelStates] = []
    groups = group_rows_by_counts(levels)
    for at in groups:
        mine = rows.x[at] if len(groups) > 1 else rows.x
        few = None if rows.lengths is None else tuple(rows.lengths[row] for row in at)
        own = values.select_rows(levels, at) if len(groups) > 1 else levels
        y, own = _aligned(params, own, mine, few, way)
        ys.append(y)
        made.append(own)
    back = torch.tensor([row for at in groups for row in at]).argsort()
    y = torch.cat(ys)[back.to(x.device)] if len(groups) > 1 else ys[0]
    levels = values.select_rows(values.concat_rows(*made), back) if len(groups) > 1 else made[0]
    return unpack(y, rows.order, attention_mask), replace(state, cms=CMSState(levels))


def group_rows_by_counts(levels: LevelStates) -> list[list[int]]:
    """Rows that stand alike in the chunks of all levels, together."""
    found: dict[tuple[int, ...], list[int]] = {}
    for row, counts in enumerate(zip(*(to_ints(level.num_tokens) for level in levels), strict=True)):
        found.setdefault(counts, []).append(row)
    return list(found.values())


def tokens_to_boundary(params: CMSParams, levels: LevelStates, row: int | None = None) -> int:
    """Tokens until the next end of a chunk, in that row or the one that is nearest to an end."""
    counts = [level.num_tokens if row is None else level.num_tokens[row] for level in levels]
    return min(C - int(count.max()) for C, count in zip(params.shape.chunk_sizes, counts, strict=True))


def _aligned(
    params: CMSParams, levels: LevelStates, x: Vectors, lengths: tuple[int, ...] | None, way: GradientMode
) -> tuple[Vectors, LevelStates]:
    """Rows that stand alike: piece by piece, each ending at the next boundary of any level."""
    T, most = x.shape[1], x.shape[1] if lengths is None else max(lengths)
    live, longest = build_valid_mask(lengths, T, x.device), 0 if lengths is None else lengths.index(most)
    ys: list[Tensor] = []
    a = 0
    while a < most:
        b = min(most, a + tokens_to_boundary(params, levels, longest))
        y, inputs = forward_levels(params, levels, x[:, a:b])
        ys.append(y)
        pairs = [associative_errors(params, l, level, inputs[l], way) for l, level in enumerate(levels)]
        here = None if live is None else live[:, a:b]
        levels = accumulate_tokens(params, levels, pairs, inputs, valid=here, gradient_mode=way)
        a = b
    if most < T:
        ys.append(x.new_zeros(len(x), T - most, x.shape[2]))
    return torch.cat(ys, 1), levels


def accumulate_tokens(
    params: CMSParams,
    levels: LevelStates,
    errors: Sequence[ErrorPairs],
    inputs: Sequence[Vectors],
    *,
    valid: Bool[Tensor, "B T"] | None = None,
    gradient_mode: GradientMode | None = None,
    step_sizes: list[StepSizes] | None = None,
) -> LevelStates:
    """The levels with T more tokens in their chunks, those that have all their tokens updated.

    `pairs` are the errors of each level and `inputs` what it read. `steps`: those by which the pairs are to be weighed.
    Raises `Usage` (2) for more tokens than the chunk has room for.
    """
    gradient_mode = gradient_mode or GradientMode()
    if step_sizes is None:
        step_sizes = [compute_step_sizes(params, l, z) for l, z in enumerate(inputs)]
    if valid is not None:
        step_sizes = [step * valid for step in step_sizes]
    T = inputs[0].shape[1]
    added = torch.full((len(inputs[0]),), T) if valid is None else valid.sum(1).cpu()
    if (
        max(
            int((level.num_tokens + added).max()) - C for level, C in zip(levels, params.shape.chunk_sizes, strict=True)
        )
        > 0
    ):
        raise UsageError(
            f"cms: {T} tokens were given to learn, the chunk has room for {tokens_to_boundary(params, levels)}; cut them there"
        )
    new = [accumulate_errors(params, l, level, errors[l], step_sizes, gradient_mode) for l, level in enumerate(levels)]
    new = [store_inputs(level, l, inputs[l], step_sizes, valid, gradient_mode) for l, level in enumerate(new)]
    return update_full_levels(
        params, tuple(replace(level, num_tokens=level.num_tokens + added) for level in new), gradient_mode
    )


def update_full_levels(params: CMSParams, levels: LevelStates, gradient_mode: GradientMode) -> LevelStates:
    """Levels whose chunk is full are updated, and nested ones begin again where the next slower one was."""
    ended = [level.num_tokens == C for level, C in zip(levels, params.shape.chunk_sizes, strict=True)]
    found = [
        select_level_rows(rows, apply_update(params, l, level, gradient_mode), level) if bool(rows.any()) else level
        for l, (rows, level) in enumerate(zip(ended, levels, strict=True))
    ]
    for l, level in enumerate(found[:-1]):
        if level.start_change and bool(ended[l + 1].any()):
            found[l] = select_level_rows(ended[l + 1], reset_to_start(params, l, level, gradient_mode), level)
    return tuple(found)


def select_level_rows(rows: Bool[Tensor, " B"], new: CMSLevelState, old: CMSLevelState) -> CMSLevelState:
    """`new` in those rows, `old` in the others."""
    if bool(rows.all()):
        return new
    return CMSLevelState(
        {name: where_rows(rows, new.change[name], old.change[name]) for name in old.change},
        {name: where_rows(rows, new.accumulated[name], old.accumulated[name]) for name in old.accumulated},
        {
            name: torch.where(_along(rows, old.moments[name]), new.moments[name], old.moments[name])
            for name in old.moments
        },
        {name: where_rows(rows, new.start_change[name], old.start_change[name]) for name in old.start_change},
        torch.where(rows, new.num_tokens, old.num_tokens),
        torch.where(rows, new.num_updates, old.num_updates),
        {
            name: where_rows(rows, new.meta_accumulated[name], old.meta_accumulated[name])
            for name in old.meta_accumulated
        },
    )


def _along(rows: Tensor, x: Tensor) -> Tensor:
    return rows.to(x.device).reshape(-1, *[1] * (x.ndim - 1))
