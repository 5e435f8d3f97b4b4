"""One level of a continuum memory: its MLP with what has changed of it, the errors it gathers, and its update.

Nested Learning arXiv:2512.24695, section 7; symbols as in `cms.py`. A bias is a column of theta whose input is 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.config.nested import OuterGradient
from laconic.models.attention import accumulation_dtype
from laconic.models.block import gated_mlp_hidden, mlp_hidden
from laconic.nested import state as values
from laconic.nested.cms.config import CMSParams, CMSShape
from laconic.nested.cms.equations import update
from laconic.nested.cms.low_rank_updates import (
    WeightChange,
    add,
    apply_change,
    frobenius_norm,
    is_empty,
    scale,
    smaller_form,
    to_dense,
    zero_change,
)
from laconic.nested.optim.dgd_equations import dgd_joint
from laconic.nested.optim.m3_equations import delta_momentum, momentum, newton_schulz
from laconic.nested.state import CMSLevelState, LowRankChange
from laconic.nested.titans.equations import l2_normalize

StepSizes = Float[Tensor, "B T"]


class LinearRecord(NamedTuple):
    """At a linear map of one pass: its input [B, T, i] and its output [B, T, o].

    The output is no leaf of the graph, so that the search for its gradient ends there: from a leaf it would go through
    all that was read before.
    """

    x: Tensor
    y: Tensor


LinearRecords = dict[str, LinearRecord]  # by `levels.0.up_proj`
STORED_INPUTS = "read"
ErrorPairs = Mapping[str, LowRankChange]  # by `up_proj`: delta and x of every token


class GradientMode(NamedTuple):
    """What of the outer loss flows through writes; `horizon` is in chunks of the level, for "truncated"."""

    outer_gradient: OuterGradient = "full"
    truncate_after: int | None = None

    @property
    def is_differentiable(self) -> bool:
        """Whether the gradients of inner losses keep a graph of their own."""
        return self.outer_gradient in ("full", "truncated") and torch.is_grad_enabled()


def init_level(shape: CMSShape, l: int, B: int, like: Tensor) -> CMSLevelState:
    """A level at its start, nothing read."""
    o, sizes = shape.options, {name: shape.projection_shape(name) for name in shape.projections}
    none: dict[str, WeightChange] = {name: zero_change(B, *size, like) for name, size in sizes.items()}
    moments: dict[str, Tensor] = {}
    if o.inner_optimizer in ("momentum", "delta_momentum", "muon"):
        moments = {name: like.new_zeros(B, *size) for name, size in sizes.items()}
    if o.inner_optimizer == "muon":
        moments["step"] = like.new_zeros(B)
    nested = o.structure == "nested" and l < len(shape.chunk_sizes) - 1
    gathered = (none if o.meta_gradient == "first_order" else init_stored_inputs(shape, B, like)) if nested else {}
    zero = torch.zeros(B, dtype=torch.long)
    return CMSLevelState(none, none, moments, none if nested else {}, zero, zero, gathered)


def init_stored_inputs(shape: CMSShape, B: int, like: Tensor) -> dict[str, WeightChange]:
    """What a level read in the slower level's chunk, where its start descends through its updates: nothing.

    Per token its input, and beside it the level's own step, the slower one's, and 1 where it is live.
    """
    return {STORED_INPUTS: zero_change(B, shape.width, 3, like)} if shape.options.meta_gradient == "full" else {}


def start_weight(params: CMSParams, l: int, name: str) -> Float[Tensor, "o i"]:
    """theta_0 of a map in the wide type, its bias as the last column."""
    key = f"levels.{l}.{name}"
    W, bias = params.weights[f"{key}.weight"], params.weights.get(f"{key}.bias")
    whole = W if bias is None else torch.cat([W, bias[:, None]], 1)
    return whole.to(accumulation_dtype(W.dtype))


def linear_map(
    params: CMSParams,
    l: int,
    name: str,
    level: CMSLevelState | None,
    records: LinearRecords | None,
    x: Float[Tensor, "B T i"],
) -> Float[Tensor, "B T o"]:
    """A map with its change; where notes are taken, what it reads, and its output, whose gradient is delta."""
    key = f"levels.{l}.{name}"
    y = F.linear(x, params.weights[f"{key}.weight"], params.weights.get(f"{key}.bias"))
    change = None if level is None else level.change[name]
    if records is None and (change is None or is_empty(change)):
        return y
    with torch.autocast(x.device.type, enabled=False):
        x = x.to(accumulation_dtype(x.dtype))
        x = F.pad(x, (0, 1), value=1.0) if params.shape.has_bias else x
        if change is not None and not is_empty(change):
            y = y + apply_change(change, x).to(y.dtype)
        if records is not None:
            y = y + torch.zeros_like(y, requires_grad=True)
            records[key] = LinearRecord(x, y)
    return y


def level_mlp(
    params: CMSParams, l: int, level: CMSLevelState | None, records: LinearRecords | None, z: Float[Tensor, "B T D"]
) -> Float[Tensor, "B T D"]:
    """MLP_l at its weights now, at its start where no level is given."""
    shape = params.shape
    up = linear_map(params, l, shape.projections[-2], level, records, z)
    if len(shape.projections) == 3:
        mid = gated_mlp_hidden(linear_map(params, l, shape.projections[0], level, records, z), up, shape.act)
    else:
        mid = mlp_hidden(up, shape.act)
    return linear_map(params, l, shape.projections[-1], level, records, mid)


def compute_step_sizes(params: CMSParams, l: int, z: Float[Tensor, "B T D"]) -> StepSizes:
    """step_t: softplus of a learned number, or of w z_t + b; over C where the chunk's mean is taken."""
    w, shape = params.weights, params.shape
    b = w[f"levels.{l}.step.bias"].to(accumulation_dtype(z.dtype))
    if shape.options.lr_granularity == "token":
        a = z.to(b.dtype) @ w[f"levels.{l}.step.weight"].to(b.dtype) + b
    else:
        a = b.expand(z.shape[:2])
    return F.softplus(a) / (shape.chunk_sizes[l] if shape.options.gradient_reduction == "mean" else 1)


def linear_errors(
    loss: Tensor, records: LinearRecords, *, create_graph: bool = False, retain_graph: bool = False
) -> dict[str, LowRankChange]:
    """delta and x at every map that was noted, of a loss that the pass led to; `again` if its graph is read again.

    With `through` they keep a graph, so that what is learned can be learned through.
    """
    found = torch.autograd.grad(
        loss,
        [noted.y for noted in records.values()],
        create_graph=create_graph,
        retain_graph=create_graph or retain_graph,
        materialize_grads=True,
    )
    made: dict[str, LowRankChange] = {}
    for (name, noted), delta in zip(records.items(), found, strict=True):
        x = noted.x if create_graph else noted.x.detach()
        made[name] = LowRankChange(delta.to(x.dtype), x)
    return made


def clip_error(pair: LowRankChange, max_norm: float) -> LowRankChange:
    """No token's delta longer than `most`, where it is not 0."""
    if not max_norm:
        return pair
    size = pair.left.square().sum(-1, keepdim=True).clamp(min=1e-30).sqrt()
    return LowRankChange(pair.left * (max_norm / size).clamp(max=1), pair.right)


def detach_for_grad(x: Tensor) -> Tensor:
    """The same numbers outside any graph, and outside inference mode."""
    return x.detach().clone() if x.is_inference() else x.detach()


def associative_errors(
    params: CMSParams, l: int, level: CMSLevelState, z: Float[Tensor, "B T D"], gradient_mode: GradientMode
) -> ErrorPairs:
    """delta and x of ½‖MLP_l(κ) - ν‖² at every token, κ = l2(W_κ z); local, so no token waits for another."""
    through, dtype = gradient_mode.is_differentiable, accumulation_dtype(z.dtype)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
        own = {name: w.to(dtype) for name, w in params.weights.items() if name.startswith(f"levels.{l}.")}
        if not through:
            own, level, z = (
                {name: detach_for_grad(w) for name, w in own.items()},
                values.map_tensors(level, detach_for_grad),
                detach_for_grad(z),
            )
        notes: LinearRecords = {}
        loss = associative_loss(CMSParams(params.shape, own), l, level, z.to(dtype), notes).sum()
        found = linear_errors(loss, notes, create_graph=through)
    return {name.rpartition(".")[2]: pair for name, pair in found.items()}


def associative_loss(
    params: CMSParams, l: int, level: CMSLevelState, z: Float[Tensor, "B T D"], records: LinearRecords | None = None
) -> Float[Tensor, "B T"]:
    """½‖MLP_l(κ) - ν‖² of every token."""
    w = params.weights
    key = l2_normalize(F.linear(z, w[f"levels.{l}.key.weight"]))
    value = F.linear(z, w[f"levels.{l}.value.weight"])
    if params.shape.options.associative_target == "start":
        value = value + level_mlp(params, l, None, None, key)
    return (level_mlp(params, l, level, records, key) - value).square().sum(-1) / 2


def scale_by_step(pair: LowRankChange, step_size: StepSizes, unit_inputs: bool) -> LowRankChange:
    """step_t delta_t x_tᵀ as factors; for dgd the root of the step on both, inputs of length 1."""
    if not unit_inputs:
        return LowRankChange(pair.left * step_size[..., None], pair.right)
    size = pair.right.square().sum(-1, keepdim=True).clamp(min=1e-30).sqrt()
    root = (torch.where(step_size > 0, step_size, 1).sqrt() * (step_size > 0))[..., None]
    return LowRankChange(pair.left * size * root, pair.right / size * root)


def accumulate_errors(
    params: CMSParams,
    l: int,
    level: CMSLevelState,
    errors: ErrorPairs,
    step_sizes: list[StepSizes],
    gradient_mode: GradientMode,
) -> CMSLevelState:
    """The level with these tokens' terms in its open chunk; `steps` of every level, 0 where a token is not live."""
    o, step = params.shape.options, step_sizes[l]
    units = o.inner_optimizer == "dgd"
    more = {name: scale_by_step(pair, step, units) for name, pair in errors.items()}
    slower = {
        name: scale_by_step(errors[name], step_sizes[l + 1], False) for name in level.meta_accumulated if name in errors
    }
    moments = dict(level.moments)
    if "step" in moments:
        moments["step"] = moments["step"] + step.sum(1)
    if gradient_mode.outer_gradient == "none":
        more, slower, moments = values.detach(more), values.detach(slower), values.detach(moments)
    return replace(
        level,
        accumulated={
            name: add(level.accumulated[name], more[name])
            if units
            else add_compressed(level.accumulated[name], more[name])
            for name in more
        },
        meta_accumulated={
            **level.meta_accumulated,
            **{name: add_compressed(level.meta_accumulated[name], more) for name, more in slower.items()},
        },
        moments=moments,
    )


def add_compressed(one: WeightChange, other: WeightChange) -> WeightChange:
    """The sum, in the form that takes less."""
    return smaller_form(add(one, other))


def inner_optimizer_step(
    params: CMSParams, l: int, name: str, level: CMSLevelState
) -> tuple[WeightChange, dict[str, Tensor]]:
    """What the inner optimizer takes from a map at the end of a chunk, and its moments."""
    o, terms, moments = params.shape.options, level.accumulated[name], dict[str, Tensor]()
    if o.inner_optimizer == "dgd":
        assert isinstance(terms, LowRankChange)
        moved = to_dense(level.change[name])
        W = moved + start_weight(params, l, name) if o.dgd_target == "weights" else moved
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
    """The largest update of every map; one that starts at zero has the level's root mean square for its start."""
    starts = {name: start_weight(params, l, name) for name in params.shape.projections}
    squares = {name: frobenius_norm(W[None]).square() for name, W in starts.items()}
    mean = torch.stack(list(squares.values())).sum(0) / sum(W.numel() for W in starts.values())
    clip = params.shape.options.max_update_ratio
    return {
        name: clip * (torch.where(starts[name].any(), square, mean * starts[name].numel())).sqrt()
        for name, square in squares.items()
    }


def clip_update(terms: WeightChange, max_norm: Tensor | None) -> WeightChange:
    """Scaled down to the bound."""
    return terms if max_norm is None else scale(terms, (max_norm / frobenius_norm(terms)).clamp(max=1))


def apply_update(params: CMSParams, l: int, level: CMSLevelState, gradient_mode: GradientMode) -> CMSLevelState:
    """The level after the update that ends its chunk, in all rows."""
    shape, C = params.shape, params.shape.chunk_sizes[l]
    most = max_update_norms(params, l) if shape.options.max_update_ratio else {}
    moved: dict[str, WeightChange] = {}
    moments: dict[str, Tensor] = {}
    for name in shape.projections:
        terms, new = inner_optimizer_step(params, l, name, level)
        moments |= new
        moved[name] = smaller_form(update(level.change[name], clip_update(terms, most.get(name)), C, C))
    if "step" in level.moments:
        moments["step"] = torch.zeros_like(level.moments["step"])
    new = replace(level, change=moved, moments=moments, accumulated=clear_terms(level.accumulated, shape))
    new = replace(new, num_tokens=torch.zeros_like(level.num_tokens), num_updates=level.num_updates + 1)
    if gradient_mode.outer_gradient == "none":
        return values.detach(new)
    if gradient_mode.outer_gradient == "truncated" and gradient_mode.truncate_after is not None:
        cut_here = level.num_updates % gradient_mode.truncate_after == gradient_mode.truncate_after - 1
        if bool(cut_here.all()):
            return values.detach(new)
        if bool(cut_here.any()):
            return values.map_tensors(new, lambda x: torch.where(_like(cut_here, x), x.detach(), x))
    return new


def _like(rows: Tensor, x: Tensor) -> Tensor:
    return rows.to(x.device).reshape(-1, *[1] * (x.ndim - 1))


def clear_terms(terms: Mapping[str, WeightChange], shape: CMSShape) -> dict[str, WeightChange]:
    """No terms of any map."""
    found: dict[str, WeightChange] = {}
    for name, change in terms.items():
        like = change.left if isinstance(change, LowRankChange) else change
        found[name] = zero_change(len(like), *shape.projection_shape(name), like.detach())
    return found
