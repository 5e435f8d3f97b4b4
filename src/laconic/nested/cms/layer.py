"""A continuum memory system in place of an MLP: vectors in, vectors out, with an immutable state.

Nested Learning arXiv:2512.24695, section 7. The functions are pure; `CMS` holds the trained weights. On its own, a
layer learns by its associative objective. For the next token's loss, `forward_levels` records
the linear maps, `level.linear_errors` turns a loss into their errors, and `accumulate_tokens` learns from these.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.config.nested import CMSOptions, LevelConnection, OuterGradient
from laconic.errors import UsageError, check_known
from laconic.models.attention import accumulation_dtype
from laconic.models.block import rms_norm
from laconic.models.ops.activation_functions import ACTIVATIONS
from laconic.nested.cms.init import GATED_MLP, init_weights
from laconic.nested.cms.level import (
    CMSParams,
    CMSShape,
    ErrorPairs,
    GradientMode,
    LinearRecords,
    associative_errors,
    compute_step_sizes,
    init_level,
    level_mlp,
)
from laconic.nested.cms.updates import LevelStates, accumulate_errors, store_inputs, update_full_levels
from laconic.nested.init import register_parameters
from laconic.nested.recurrence.chunked_scan import (
    build_valid_mask,
    check_inputs,
    get_weights,
    pack_left,
    to_ints,
    unpack,
)
from laconic.nested.state import CMSLevelState, CMSState, LayerState, check_reader, map_groups

LevelFunction = Callable[[Tensor], Tensor]
Vectors = Float[Tensor, "B T D"]


def chain(
    x: Vectors,
    levels: Sequence[LevelFunction],
    norms: Sequence[LevelFunction | None],
    connection: LevelConnection = "residual",
) -> Vectors:
    """Eq. 70: y = MLP_{K-1}(... MLP_0(x)), or with residuals: y_l = y_{l-1} + MLP_l(norm_l(x + y_{l-1})).

    `levels` are in the order in which they run. The first has no norm, and alone it is the MLP itself.
    """
    y = levels[0](x)
    for level, norm in zip(levels[1:], norms[1:], strict=True):
        z = y if connection == "plain" else x + y
        z = z if norm is None else norm(z)
        y = level(z) if connection == "plain" else y + level(z)
    return y


def aggregate(outputs: Sequence[Vectors], a: Float[Tensor, " K"]) -> Vectors:
    """Eq. 74: y = sum over l of a_l MLP_l(x), every level reading x."""
    return torch.stack([weight * y for weight, y in zip(a.unbind(), outputs, strict=True)]).sum(0)


def initial_state(params: CMSParams, batch_size: int) -> LayerState:
    like = next(iter(params.weights.values())).detach()
    like = like.new_zeros(1, dtype=accumulation_dtype(like.dtype))
    levels = tuple(init_level(params.shape, l, batch_size, like) for l in range(len(params.shape.chunk_sizes)))
    return LayerState(cms=CMSState(levels), readers=params.shape.label)


def require_levels(state: LayerState) -> LevelStates:
    """Return the levels of a state. Raises `UsageError` for the state of another kind of layer."""
    if state.cms is None:
        raise UsageError("cms: the state is that of another kind of layer; leave it out to start with a new one")
    return state.cms.levels


def forward_levels(
    params: CMSParams, levels: LevelStates, x: Vectors, records: LinearRecords | None = None
) -> tuple[Vectors, list[Vectors]]:
    """Run the levels at their current weights; return the output, and the input of each level."""
    shape, w = params.shape, params.weights
    inputs: list[Vectors] = []

    def run_level(l: int, z: Vectors) -> Vectors:
        inputs.append(z)
        return level_mlp(params, l, levels[l], records, z)

    functions = [partial(run_level, l) for l in range(len(levels))]
    if shape.options.structure == "independent":
        y = aggregate([level(x) for level in functions], w["a"])
    else:
        names = [f"levels.{l}.norm.weight" for l in range(len(levels))]
        norms = [partial(rms_norm, weight=w[name], eps=shape.eps) if name in w else None for name in names]
        y = chain(x, functions, norms, shape.options.residual)
    return y, inputs


def tokens_to_boundary(params: CMSParams, levels: LevelStates, row: int | None = None) -> int:
    """Return the tokens until the next end of a chunk, of one row or of the row that is closest to it."""
    counts = [level.num_tokens if row is None else level.num_tokens[row] for level in levels]
    return min(C - int(count.max()) for C, count in zip(params.shape.chunk_sizes, counts, strict=True))


def _scan_aligned(
    params: CMSParams, levels: LevelStates, x: Vectors, lengths: tuple[int, ...] | None, gradient_mode: GradientMode
) -> tuple[Vectors, LevelStates]:
    """Read rows at the same offset, up to the next boundary of any level at a time."""
    T = x.shape[1]
    T_valid = T if lengths is None else max(lengths)
    longest = 0 if lengths is None else lengths.index(T_valid)  # the row with the most tokens
    valid = build_valid_mask(lengths, T, x.device)
    outputs: list[Tensor] = []
    a = 0
    while a < T_valid:
        b = min(T_valid, a + tokens_to_boundary(params, levels, longest))
        y, inputs = forward_levels(params, levels, x[:, a:b])
        outputs.append(y)
        errors = [associative_errors(params, l, level, inputs[l], gradient_mode) for l, level in enumerate(levels)]
        part_valid = None if valid is None else valid[:, a:b]
        levels = accumulate_tokens(params, levels, errors, inputs, gradient_mode, part_valid)
        a = b
    if T_valid < T:
        outputs.append(x.new_zeros(len(x), T - T_valid, x.shape[2]))
    return torch.cat(outputs, 1), levels


def accumulate_tokens(
    params: CMSParams,
    levels: LevelStates,
    errors: Sequence[ErrorPairs],
    inputs: Sequence[Vectors],
    gradient_mode: GradientMode,
    valid: Bool[Tensor, "B T"] | None = None,
) -> LevelStates:
    """Add the `valid` ones of T tokens to the open chunks, and update the levels whose chunk is complete.

    `errors` and `inputs` are by level. Raises `UsageError` if the open chunk has no room for the tokens.
    """
    step_sizes = [compute_step_sizes(params, l, z) for l, z in enumerate(inputs)]
    if valid is not None:
        step_sizes = [step_size * valid for step_size in step_sizes]
    T = inputs[0].shape[1]
    added = torch.full((len(inputs[0]),), T) if valid is None else valid.sum(1).cpu()
    sizes = params.shape.chunk_sizes
    if any(int((level.num_tokens + added).max()) > C for level, C in zip(levels, sizes, strict=True)):
        raise UsageError(f"cms: {T} tokens exceed the {tokens_to_boundary(params, levels)} left in the chunk")
    new: list[CMSLevelState] = []
    with torch.autocast(inputs[0].device.type, enabled=False):  # changes are kept in float32
        for l, level in enumerate(levels):
            level = accumulate_errors(params, l, level, errors[l], step_sizes)
            level = store_inputs(level, l, inputs[l], step_sizes, valid)
            new.append(replace(level, num_tokens=level.num_tokens + added))
        return update_full_levels(params, tuple(new), gradient_mode)


class CMS(nn.Module):
    """A continuum memory system in place of an MLP: `y, state = mlp(x, state)`; the caller adds the residual.

    Args:
        width: Width of the vectors.
        intermediate_size: Inner width of the MLPs.
        chunk_sizes: Tokens between two updates of each level, fastest first.
        options: Options of the levels, by default those of the associative objective.
        seed: Seed of the initial weights; None leaves them uninitialized.
        activation: Activation of the MLPs.
        projections: Names of the linear maps: gate, up and down, or up and down.
        has_bias: Whether the maps have biases.
        eps: epsilon of the norms between levels.

    Examples:
        >>> import torch, laconic
        >>> mlp = laconic.CMS(32, 64, chunk_sizes=(2, 4))
        >>> y, state = mlp(torch.randn(1, 10, 32))
        >>> y.shape
        torch.Size([1, 10, 32])
    """

    def __init__(
        self,
        width: int,
        intermediate_size: int,
        chunk_sizes: Sequence[int] = (64, 512),
        options: CMSOptions | None = None,
        seed: int | None = 0,
        *,
        activation: str = "silu",
        projections: tuple[str, ...] = GATED_MLP,
        has_bias: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if isinstance(chunk_sizes, int):
            raise UsageError(f"cms: chunk_sizes {chunk_sizes}: give one for each level, such as ({chunk_sizes},)")
        check_known("activation", activation, ACTIVATIONS)
        if len(projections) not in (2, 3):
            raise UsageError(f"projections {list(projections)}: give the names of gate, up and down, or of up and down")
        options = options or CMSOptions(inner_objective="associative")
        self.shape = CMSShape(
            width, intermediate_size, tuple(chunk_sizes), options, activation, tuple(projections), has_bias, eps
        )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        register_parameters(self, init_weights(self.shape, generator))

    @property
    def params(self) -> CMSParams:
        return CMSParams(self.shape, get_weights(self))

    def forward(
        self,
        x: Vectors,
        state: LayerState | None = None,
        *,
        attention_mask: Bool[Tensor, "B T"] | None = None,
        update_weights: bool = True,
        outer_gradient: OuterGradient = "full",
        truncate_after: int | None = None,
    ) -> tuple[Vectors, LayerState]:
        """Read vectors through the levels, which learn by their associative objective.

        Args:
            x: Input vectors.
            state: State before the vectors, by default that of levels that have read nothing.
            attention_mask: True for real tokens; the others give zeros and change nothing.
            update_weights: If False, the levels and their token counts stay as they are. They also do for the objective
                "task", which needs a loss, and for a learning rate of 0.
            outer_gradient: Part of the outer gradient that flows through updates; values do not change.
            truncate_after: Chunks after which states are detached, for "truncated".

        Returns:
            The outputs without the residual, and the new state.

        Raises:
            UsageError: If the arguments do not fit the layer.
        """
        params = self.params
        state = initial_state(params, len(x)) if state is None else state
        check_inputs("cms", params.shape.width, state, x, attention_mask, outer_gradient, truncate_after)
        levels = require_levels(state)
        check_reader(params.shape.label, state)
        if not update_weights or params.shape.is_frozen or params.shape.options.inner_objective == "task":
            return forward_levels(params, levels, x)[0], state
        tokens = pack_left(x, attention_mask)

        def scan(rows: list[int], levels: LevelStates, x: Vectors) -> tuple[Vectors, LevelStates]:
            lengths = None if tokens.lengths is None else tuple(tokens.lengths[row] for row in rows)
            return _scan_aligned(params, levels, x, lengths, GradientMode(outer_gradient, truncate_after))

        offsets = zip(*(to_ints(level.num_tokens) for level in levels), strict=True)
        y, levels = map_groups(offsets, scan, levels, tokens.x)
        return unpack(y, tokens.order, attention_mask), replace(state, cms=CMSState(levels))
