"""Read vectors through the levels of a continuum memory system, which are updated at the end of their chunks.

Nested Learning arXiv:2512.24695, section 7. On its own, a layer learns by its associative objective, in
`forward_with_state`. For the next token's loss, `forward_levels` records the linear maps, `level.linear_errors` turns a
loss into their errors, and `accumulate_tokens` learns from these.
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
from laconic.nested.cms.config import CMSParams
from laconic.nested.cms.equations import aggregate, chain
from laconic.nested.cms.level import (
    ErrorPairs,
    GradientMode,
    LinearRecords,
    associative_errors,
    compute_step_sizes,
    init_level,
    level_mlp,
)
from laconic.nested.cms.low_rank_changes import where_rows
from laconic.nested.cms.updates import accumulate_errors, apply_update, expand_rows, reset_to_start, store_inputs
from laconic.nested.recurrence.chunked_scan import check_inputs
from laconic.nested.recurrence.packing import build_valid_mask, pack_left, to_ints, unpack
from laconic.nested.state import CMSLevelState, CMSState, LayerState, group_rows, join_groups, select_rows

LevelStates = tuple[CMSLevelState, ...]
Vectors = Float[Tensor, "B T D"]


def initial_state(params: CMSParams, batch_size: int) -> LayerState:
    """Return the state of levels that have read nothing."""
    like = next(iter(params.weights.values())).detach()
    like = like.new_zeros(1, dtype=accumulation_dtype(like.dtype))
    levels = range(len(params.shape.chunk_sizes))
    return LayerState(cms=CMSState(tuple(init_level(params.shape, l, batch_size, like) for l in levels)))


def require_levels(state: LayerState) -> LevelStates:
    """Return the levels of a state. Raises `UsageError` for the state of another kind of layer."""
    if state.cms is None:
        raise UsageError("cms: the state has no levels; create one with initial_state(params, batch_size)")
    return state.cms.levels


def forward_levels(
    params: CMSParams, levels: LevelStates, x: Vectors, records: LinearRecords | None = None
) -> tuple[Vectors, list[Vectors]]:
    """Run the levels at their current weights.

    Returns:
        The output, and the input of each level.
    """
    shape, w = params.shape, params.weights
    inputs: dict[int, Tensor] = {}

    def run_level(l: int, z: Vectors) -> Vectors:
        inputs[l] = z
        return level_mlp(params, l, levels[l], records, z)

    functions = [partial(run_level, l) for l in shape.run_order]
    if shape.options.structure == "independent":
        y = aggregate([level(x) for level in functions], w["a"][list(shape.run_order)])
    else:
        names = [f"levels.{l}.norm.weight" for l in shape.run_order]
        norms = [partial(rms_norm, weight=w[name], eps=shape.eps) if name in w else None for name in names]
        y = chain(x, functions, norms, shape.options.residual)
    return y, [inputs[l] for l in range(len(levels))]


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
    """Read vectors through the levels, which learn by their associative objective.

    Args:
        params: shape and weights of the levels.
        state: state before the vectors.
        x: input vectors.
        attention_mask: True for real tokens; the others give zeros and change nothing.
        update_weights: if False, the levels and their token counts stay as they are. They also do for the objective
            "task", which needs a loss, and for a learning rate of 0.
        outer_gradient: what of the outer loss flows through updates. It changes no value.
        truncate_after: chunks after which states are detached, for "truncated".

    Returns:
        The outputs without the residual, and the new state.

    Raises:
        UsageError: if the arguments do not fit the layer.
    """
    check_inputs("cms", params.shape.width, state, x, attention_mask, outer_gradient, truncate_after)
    levels = require_levels(state)
    if not update_weights or params.shape.is_frozen or params.shape.options.inner_objective == "task":
        return forward_levels(params, levels, x)[0], state
    tokens, gradient_mode = pack_left(x, attention_mask), GradientMode(outer_gradient, truncate_after)
    groups = group_rows(zip(*(to_ints(level.num_tokens) for level in levels), strict=True))
    if len(groups) == 1:
        y, levels = _scan_aligned(params, levels, tokens.x, tokens.lengths, gradient_mode)
        return unpack(y, tokens.order, attention_mask), replace(state, cms=CMSState(levels))
    results: list[tuple[Vectors, LevelStates]] = []
    for rows in groups:
        lengths = None if tokens.lengths is None else tuple(tokens.lengths[row] for row in rows)
        results.append(_scan_aligned(params, select_rows(levels, rows), tokens.x[rows], lengths, gradient_mode))
    y, levels = join_groups(groups, results)
    return unpack(y, tokens.order, attention_mask), replace(state, cms=CMSState(levels))


def tokens_to_boundary(params: CMSParams, levels: LevelStates, row: int | None = None) -> int:
    """Return the tokens until the next end of a chunk, of one row or of the row that is closest to it."""
    counts = [level.num_tokens if row is None else level.num_tokens[row] for level in levels]
    return min(C - int(count.max()) for C, count in zip(params.shape.chunk_sizes, counts, strict=True))


def _scan_aligned(
    params: CMSParams,
    levels: LevelStates,
    x: Vectors,
    lengths: tuple[int, ...] | None,
    gradient_mode: GradientMode,
) -> tuple[Vectors, LevelStates]:
    """Read rows at the same offset, up to the next boundary of any level at a time."""
    T, T_valid = x.shape[1], x.shape[1] if lengths is None else max(lengths)
    valid, longest = build_valid_mask(lengths, T, x.device), 0 if lengths is None else lengths.index(T_valid)
    outputs: list[Tensor] = []
    a = 0
    while a < T_valid:
        b = min(T_valid, a + tokens_to_boundary(params, levels, longest))
        y, inputs = forward_levels(params, levels, x[:, a:b])
        outputs.append(y)
        errors = [associative_errors(params, l, level, inputs[l], gradient_mode) for l, level in enumerate(levels)]
        part_valid = None if valid is None else valid[:, a:b]
        levels = accumulate_tokens(params, levels, errors, inputs, valid=part_valid, gradient_mode=gradient_mode)
        a = b
    if T_valid < T:
        outputs.append(x.new_zeros(len(x), T - T_valid, x.shape[2]))
    return torch.cat(outputs, 1), levels


def accumulate_tokens(
    params: CMSParams,
    levels: LevelStates,
    errors: Sequence[ErrorPairs],
    inputs: Sequence[Vectors],
    *,
    valid: Bool[Tensor, "B T"] | None = None,
    gradient_mode: GradientMode | None = None,
) -> LevelStates:
    """Add T tokens, of which the `valid` ones count, to the open chunks, and update the levels whose chunk is complete.

    `errors` and `inputs` are by level. Raises `UsageError` if the open chunk has no room for the tokens.
    """
    gradient_mode = gradient_mode or GradientMode()
    step_sizes = [compute_step_sizes(params, l, z) for l, z in enumerate(inputs)]
    if valid is not None:
        step_sizes = [step_size * valid for step_size in step_sizes]
    T = inputs[0].shape[1]
    added = torch.full((len(inputs[0]),), T) if valid is None else valid.sum(1).cpu()
    sizes = params.shape.chunk_sizes
    if any(int((level.num_tokens + added).max()) > C for level, C in zip(levels, sizes, strict=True)):
        raise UsageError(f"cms: {T} tokens exceed the {tokens_to_boundary(params, levels)} left in the chunk")
    new: list[CMSLevelState] = []
    for l, level in enumerate(levels):
        level = accumulate_errors(params, l, level, errors[l], step_sizes, gradient_mode)
        level = store_inputs(level, l, inputs[l], step_sizes, valid, gradient_mode)
        new.append(replace(level, num_tokens=level.num_tokens + added))
    return update_full_levels(params, tuple(new), gradient_mode)


def update_full_levels(params: CMSParams, levels: LevelStates, gradient_mode: GradientMode) -> LevelStates:
    """Update the levels whose chunk is complete, and restart nested levels whose next slower one was."""
    ended = [level.num_tokens == C for level, C in zip(levels, params.shape.chunk_sizes, strict=True)]
    new = [
        select_level_rows(rows, apply_update(params, l, level, gradient_mode), level) if bool(rows.any()) else level
        for l, (rows, level) in enumerate(zip(ended, levels, strict=True))
    ]
    for l, level in enumerate(new[:-1]):
        if level.start_change and bool(ended[l + 1].any()):
            new[l] = select_level_rows(ended[l + 1], reset_to_start(params, l, level, gradient_mode), level)
    return tuple(new)


def select_level_rows(rows: Bool[Tensor, " B"], new: CMSLevelState, old: CMSLevelState) -> CMSLevelState:
    """Return `new` in the rows of the mask and `old` in the others."""
    if bool(rows.all()):
        return new
    return CMSLevelState(
        {name: where_rows(rows, new.change[name], old.change[name]) for name in old.change},
        {name: where_rows(rows, new.accumulated[name], old.accumulated[name]) for name in old.accumulated},
        {name: torch.where(expand_rows(rows, m), new.moments[name], m) for name, m in old.moments.items()},
        {name: where_rows(rows, new.start_change[name], old.start_change[name]) for name in old.start_change},
        torch.where(rows, new.num_tokens, old.num_tokens),
        torch.where(rows, new.num_updates, old.num_updates),
        {name: where_rows(rows, new.meta_accumulated[name], x) for name, x in old.meta_accumulated.items()},
    )
