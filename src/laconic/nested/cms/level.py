"""One level of a continuum memory system: its weights, its MLP at them, and the gradients of its inner loss.

Nested Learning arXiv:2512.24695, section 7. Level 0 is the fastest. A weight is its trained start plus a change, one
per row of the batch: a sum of outer products, or dense once that is smaller. A bias is a column whose input is 1.

Symbols: K levels l; C_l tokens between two updates of level l, its chunk size; theta its weights [o, i]; x the input of
a map, delta the gradient at its output; R outer products of a change; y the output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.config.nested import CMSOptions, OuterGradient, find_size_error
from laconic.errors import UsageError
from laconic.models.attention import accumulation_dtype
from laconic.models.block import gated_mlp_hidden, plain_mlp_hidden
from laconic.models.ops.linear import linear_function
from laconic.nested.recurrence.memory_cells import l2_normalize
from laconic.nested.state import CMSLevelState, LowRankChange, map_tensors

WeightChange = LowRankChange | Tensor
MIN_SQUARED_NORM = 1e-30  # below it, clamp cuts the gradient: that of a norm at 0 is 0, not NaN
StepSizes = Float[Tensor, "B T"]
ErrorPairs = Mapping[str, LowRankChange]  # delta (left) and x (right) of every token, by map: `up_proj`
MIN_TOKENS_TO_MERGE = 32  # for fewer tokens, a second product is faster than the sum of two matrices
STORED_INPUTS = "read"  # key of the inputs in `CMSLevelState.meta_accumulated`


@dataclass(frozen=True)
class CMSShape:
    """Size and options of the levels of one layer, as `CMS` takes them. Raises `UsageError` if they do not fit."""

    width: int
    intermediate_size: int
    chunk_sizes: tuple[int, ...]
    options: CMSOptions
    activation: str = "silu"
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    has_bias: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if error := find_size_error(self.width, self.intermediate_size, self.chunk_sizes):
            raise UsageError(f"cms: {error}")

    @property
    def label(self) -> str:
        return f"cms of width {self.width} and {self.intermediate_size} in chunks of {list(self.chunk_sizes)}; "

    @property
    def is_frozen(self) -> bool:
        """Whether no level can ever change."""
        return self.options.inner_lr == 0

    def projection_shape(self, name: str) -> tuple[int, int]:
        """Return outputs and inputs of a linear map; a bias is one more input, which is 1."""
        o, i = self.width, self.intermediate_size
        o, i = (o, i) if name == self.projections[-1] else (i, o)
        return o, i + self.has_bias


class CMSParams(NamedTuple):
    """Shape and trained weights of the levels of a layer, by name."""

    shape: CMSShape
    weights: Mapping[str, Tensor]


class LinearRecord(NamedTuple):
    """Input [B, T, i] and output [B, T, o] of a linear map in one pass.

    The output is not a leaf of the graph, so that the backward pass to it ends there; to a leaf it would run through
    everything read before.
    """

    x: Tensor
    y: Tensor


LinearRecords = dict[str, LinearRecord]  # by `levels.0.up_proj`


class GradientMode(NamedTuple):
    """Which part of the outer gradient flows through updates; `truncate_after` counts chunks, for "truncated"."""

    outer_gradient: OuterGradient = "full"
    truncate_after: int | None = None

    @property
    def is_differentiable(self) -> bool:
        """Whether the gradients of inner losses keep a graph."""
        return self.outer_gradient in ("full", "truncated") and torch.is_grad_enabled()


def zero_change(B: int, o: int, i: int, like: Tensor) -> LowRankChange:
    return LowRankChange(like.new_zeros(B, 0, o), like.new_zeros(B, 0, i))


def to_dense(change: WeightChange) -> Float[Tensor, "B o i"]:
    return change.dense if isinstance(change, LowRankChange) else change


def apply_change(change: WeightChange, x: Float[Tensor, "B T i"]) -> Float[Tensor, "B T o"]:
    """Return what the change adds to W x; a low-rank change costs R (o + i) multiplications per token."""
    if isinstance(change, LowRankChange):
        return (x @ change.right.mT) @ change.left
    return x @ change.mT


def is_empty(change: WeightChange) -> bool:
    return isinstance(change, LowRankChange) and not change.left.shape[1]


def add(one: WeightChange, other: WeightChange) -> WeightChange:
    """Return the sum, dense if one of the two is dense."""
    if isinstance(one, LowRankChange) and isinstance(other, LowRankChange):
        return LowRankChange(torch.cat([one.left, other.left], 1), torch.cat([one.right, other.right], 1))
    if is_empty(one) or is_empty(other):
        return other if is_empty(one) else one
    if isinstance(one, LowRankChange):
        one, other = other, one
    if isinstance(other, LowRankChange):
        return torch.baddbmm(to_dense(one), other.left.mT, other.right)
    return to_dense(one) + other


def scale(change: WeightChange, factor: Float[Tensor, " B"] | float) -> WeightChange:
    by = factor[:, None, None] if isinstance(factor, Tensor) else factor
    return LowRankChange(change.left * by, change.right) if isinstance(change, LowRankChange) else change * by


def smaller_form(change: WeightChange) -> WeightChange:
    """Return the change in the form that stores less: dense from R = o i / (o + i) on."""
    if isinstance(change, LowRankChange):
        R, o, i = change.left.shape[1], change.left.shape[2], change.right.shape[2]
        return change.dense if R * (o + i) >= o * i else change
    return change


def frobenius_norm(change: WeightChange) -> Float[Tensor, " B"]:
    """Return the Frobenius norm of each row's change, with gradient 0 at 0."""
    if isinstance(change, LowRankChange):
        # |leftᵀ right|² is the sum of (left leftᵀ) ∘ (right rightᵀ), which are rank x rank instead of o x i
        squared = ((change.left @ change.left.mT) * (change.right @ change.right.mT)).sum((-2, -1))
    else:
        squared = change.square().sum((-2, -1))
    return squared.clamp(min=MIN_SQUARED_NORM).sqrt()


def init_level(shape: CMSShape, l: int, B: int, like: Tensor) -> CMSLevelState:
    options = shape.options
    sizes = {name: shape.projection_shape(name) for name in shape.projections}
    empty: dict[str, WeightChange] = {name: zero_change(B, *size, like) for name, size in sizes.items()}
    moments: dict[str, Tensor] = {}
    if options.inner_optimizer in ("momentum", "delta_momentum", "muon"):
        moments = {name: like.new_zeros(B, *size) for name, size in sizes.items()}
    if options.inner_optimizer == "muon":
        moments["step"] = like.new_zeros(B)
    is_nested = options.structure == "nested" and l < len(shape.chunk_sizes) - 1
    meta = empty if options.meta_gradient == "first_order" else init_stored_inputs(shape, B, like)
    zero = torch.zeros(B, dtype=torch.long)
    return CMSLevelState(empty, empty, moments, empty if is_nested else {}, zero, zero, meta if is_nested else {})


def init_stored_inputs(shape: CMSShape, B: int, like: Tensor) -> dict[str, WeightChange]:
    """Return the empty store of inputs of a level whose start is trained through its updates.

    A row of the store is one token: its input, and beside it the level's step size, the slower level's, and 1 if the
    token is valid.
    """
    return {STORED_INPUTS: zero_change(B, shape.width, 3, like)} if shape.options.meta_gradient == "full" else {}


def start_weight(params: CMSParams, l: int, name: str) -> Float[Tensor, "o i"]:
    """Return theta_0 of a map in the accumulation type, with the bias as its last column."""
    key = f"levels.{l}.{name}"
    weight, bias = params.weights[f"{key}.weight"], params.weights.get(f"{key}.bias")
    weight = weight if bias is None else torch.cat([weight, bias[:, None]], 1)
    return weight.to(accumulation_dtype(weight.dtype))


def can_merge(weight: Float[Tensor, "o i"], change: WeightChange, x: Float[Tensor, "B T i"]) -> bool:
    """Return whether to add a change to its weight, which loses nothing and is faster than two products of `x`."""
    if not isinstance(change, Tensor) or change.shape != (1, *weight.shape) or x.shape[1] < MIN_TOKENS_TO_MERGE:
        return False
    return change.dtype == weight.dtype == x.dtype and not torch.is_autocast_enabled(x.device.type)


def linear_map(
    params: CMSParams,
    l: int,
    name: str,
    level: CMSLevelState | None,
    records: LinearRecords | None,
    x: Float[Tensor, "B T i"],
) -> Float[Tensor, "B T o"]:
    """Apply a linear map with its change; if `records` is given, record its input and output."""
    key = f"levels.{l}.{name}"
    weight = params.weights[f"{key}.weight"]
    change = None if level is None or is_empty(level.change[name]) else level.change[name]
    if change is not None and can_merge(weight, change, x):
        weight = weight + to_dense(change)[0]
        change = None
    y = linear_function(x, weight, params.weights.get(f"{key}.bias"))
    if records is None and change is None:
        return y
    with torch.autocast(x.device.type, enabled=False):
        x = x.to(accumulation_dtype(x.dtype))
        x = F.pad(x, (0, 1), value=1.0) if params.shape.has_bias else x
        if change is not None:
            y = y + apply_change(change, x).to(y.dtype)
        if records is not None:
            y = y + torch.zeros_like(y, requires_grad=True)  # has a gradient even if no weight requires one
            records[key] = LinearRecord(x, y)
    return y


def level_mlp(
    params: CMSParams, l: int, level: CMSLevelState | None, records: LinearRecords | None, z: Float[Tensor, "B T D"]
) -> Float[Tensor, "B T D"]:
    """Apply MLP_l at its current weights, or at its start if `level` is None."""
    shape = params.shape
    up = linear_map(params, l, shape.projections[-2], level, records, z)
    if len(shape.projections) == 3:
        gate = linear_map(params, l, shape.projections[0], level, records, z)
        hidden = gated_mlp_hidden(gate, up, shape.activation)
    else:
        hidden = plain_mlp_hidden(up, shape.activation)
    return linear_map(params, l, shape.projections[-1], level, records, hidden)


def compute_step_sizes(params: CMSParams, l: int, z: Float[Tensor, "B T D"]) -> StepSizes:
    """Return step_t: softplus of a learned number or of w z_t + b."""
    w, shape = params.weights, params.shape
    b = w[f"levels.{l}.step.bias"].to(accumulation_dtype(z.dtype))
    if shape.options.lr_granularity == "token":
        a = z.to(b.dtype) @ w[f"levels.{l}.step.weight"].to(b.dtype) + b
    else:
        a = b.expand(z.shape[:2])
    return F.softplus(a)


def linear_errors(
    loss: Tensor, records: LinearRecords, *, create_graph: bool = False, retain_graph: bool = False
) -> dict[str, LowRankChange]:
    """Return delta and x of every recorded map, in one backward pass of a loss computed from the recorded pass."""
    outputs = [record.y for record in records.values()]
    gradients = torch.autograd.grad(
        loss, outputs, create_graph=create_graph, retain_graph=create_graph or retain_graph, materialize_grads=True
    )
    errors: dict[str, LowRankChange] = {}
    for (name, record), delta in zip(records.items(), gradients, strict=True):
        x = record.x if create_graph else record.x.detach()
        errors[name] = LowRankChange(delta.to(x.dtype), x)
    return errors


def clip_error(pair: LowRankChange, max_norm: float) -> LowRankChange:
    """Clip the norm of each token's delta; a `max_norm` of 0 does not clip."""
    if not max_norm:
        return pair
    norm = pair.left.square().sum(-1, keepdim=True).clamp(min=MIN_SQUARED_NORM).sqrt()
    return LowRankChange(pair.left * (max_norm / norm).clamp(max=1), pair.right)


def detach_for_grad(x: Tensor) -> Tensor:
    """Detach a tensor; one made in inference mode is cloned, since autograd refuses it."""
    return x.detach().clone() if x.is_inference() else x.detach()


def associative_errors(
    params: CMSParams, l: int, level: CMSLevelState, z: Float[Tensor, "B T D"], gradient_mode: GradientMode
) -> ErrorPairs:
    """Return delta and x of ½‖MLP_l(κ) - ν‖² at every token. The loss is local, so no token waits for another."""
    create_graph = gradient_mode.is_differentiable
    dtype = accumulation_dtype(z.dtype)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
        weights = {name: w.to(dtype) for name, w in params.weights.items() if name.startswith(f"levels.{l}.")}
        if not create_graph:
            weights = {name: detach_for_grad(w) for name, w in weights.items()}
            level, z = map_tensors(level, detach_for_grad), detach_for_grad(z)
        records: LinearRecords = {}
        loss = associative_loss(CMSParams(params.shape, weights), l, level, z.to(dtype), records).sum()
        errors = linear_errors(loss, records, create_graph=create_graph)
    return {name.rpartition(".")[2]: pair for name, pair in errors.items()}


def associative_loss(
    params: CMSParams, l: int, level: CMSLevelState, z: Float[Tensor, "B T D"], records: LinearRecords | None = None
) -> Float[Tensor, "B T"]:
    """Compute ½‖MLP_l(κ) - ν‖² of every token, with κ = l2(W_κ z).

    ν = W_ν z, plus MLP_l(κ) at its start if the options say that the start is the target.
    """
    w = params.weights
    key = l2_normalize(F.linear(z, w[f"levels.{l}.key.weight"]))
    value = F.linear(z, w[f"levels.{l}.value.weight"])
    if params.shape.options.associative_target == "start":
        value = value + level_mlp(params, l, None, None, key)
    return (level_mlp(params, l, level, records, key) - value).square().sum(-1) / 2
