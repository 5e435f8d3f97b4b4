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

from laconic.core import state as values
from laconic.core.attention import wide
from laconic.core.block import gated_mid, plain_mid
from laconic.core.state import Factors, Level
from laconic.methods.changes import Change, applied, dense, folded, is_none, length, nothing, plus, times
from laconic.methods.cms import update
from laconic.methods.cms_shape import Params, Shape
from laconic.methods.dgd import dgd_joint
from laconic.methods.learning_settings import Gradient
from laconic.methods.m3 import delta_momentum, momentum, newton_schulz
from laconic.methods.titans import l2

Steps = Float[Tensor, "B T"]


class Noted(NamedTuple):
    """At a linear map of one pass: its input [B, T, i] and its output [B, T, o].

    The output is no leaf of the graph, so that the search for its gradient ends there: from a leaf it would go through
    all that was read before.
    """

    x: Tensor
    y: Tensor


Notes = dict[str, Noted]  # by `levels.0.up_proj`
READ = "read"
Pairs = Mapping[str, Factors]  # by `up_proj`: delta and x of every token


class Way(NamedTuple):
    """What of the outer loss flows through writes; `horizon` is in chunks of the level, for "truncated"."""

    gradient: Gradient = "full"
    horizon: int | None = None

    @property
    def through(self) -> bool:
        """Whether the gradients of inner losses keep a graph of their own."""
        return self.gradient in ("full", "truncated") and torch.is_grad_enabled()


def fresh(shape: Shape, l: int, B: int, like: Tensor) -> Level:
    """A level at its start, nothing read."""
    o, sizes = shape.options, {name: shape.sizes(name) for name in shape.maps}
    none: dict[str, Change] = {name: nothing(B, *size, like) for name, size in sizes.items()}
    moments: dict[str, Tensor] = {}
    if o.inner_optimizer in ("momentum", "delta_momentum", "muon"):
        moments = {name: like.new_zeros(B, *size) for name, size in sizes.items()}
    if o.inner_optimizer == "muon":
        moments["step"] = like.new_zeros(B)
    nested = o.structure == "nested" and l < len(shape.chunks) - 1
    gathered = (none if o.meta == "first_order" else unread(shape, B, like)) if nested else {}
    zero = torch.zeros(B, dtype=torch.long)
    return Level(none, none, moments, none if nested else {}, zero, zero, gathered)


def unread(shape: Shape, B: int, like: Tensor) -> dict[str, Change]:
    """What a level read in the slower level's chunk, where its start descends through its updates: nothing.

    Per token its input, and beside it the level's own step, the slower one's, and 1 where it is live.
    """
    return {READ: nothing(B, shape.width, 3, like)} if shape.options.meta == "full" else {}


def start_of(params: Params, l: int, name: str) -> Float[Tensor, "o i"]:
    """theta_0 of a map in the wide type, its bias as the last column."""
    key = f"levels.{l}.{name}"
    W, bias = params.tensors[f"{key}.weight"], params.tensors.get(f"{key}.bias")
    whole = W if bias is None else torch.cat([W, bias[:, None]], 1)
    return whole.to(wide(W.dtype))


def linear(
    params: Params, l: int, name: str, level: Level | None, notes: Notes | None, x: Float[Tensor, "B T i"]
) -> Float[Tensor, "B T o"]:
    """A map with its change; where notes are taken, what it reads, and its output, whose gradient is delta."""
    key = f"levels.{l}.{name}"
    y = F.linear(x, params.tensors[f"{key}.weight"], params.tensors.get(f"{key}.bias"))
    change = None if level is None else level.moved[name]
    if notes is None and (change is None or is_none(change)):
        return y
    with torch.autocast(x.device.type, enabled=False):
        x = x.to(wide(x.dtype))
        x = F.pad(x, (0, 1), value=1.0) if params.shape.bias else x
        if change is not None and not is_none(change):
            y = y + applied(change, x).to(y.dtype)
        if notes is not None:
            y = y + torch.zeros_like(y, requires_grad=True)
            notes[key] = Noted(x, y)
    return y


def mlp(
    params: Params, l: int, level: Level | None, notes: Notes | None, z: Float[Tensor, "B T D"]
) -> Float[Tensor, "B T D"]:
    """MLP_l at its weights now, at its start where no level is given."""
    shape = params.shape
    up = linear(params, l, shape.maps[-2], level, notes, z)
    if len(shape.maps) == 3:
        mid = gated_mid(linear(params, l, shape.maps[0], level, notes, z), up, shape.act)
    else:
        mid = plain_mid(up, shape.act)
    return linear(params, l, shape.maps[-1], level, notes, mid)


def step_sizes(params: Params, l: int, z: Float[Tensor, "B T D"]) -> Steps:
    """step_t: softplus of a learned number, or of w z_t + b; over C where the chunk's mean is taken."""
    w, shape = params.tensors, params.shape
    b = w[f"levels.{l}.step.bias"].to(wide(z.dtype))
    if shape.options.step == "token":
        a = z.to(b.dtype) @ w[f"levels.{l}.step.weight"].to(b.dtype) + b
    else:
        a = b.expand(z.shape[:2])
    return F.softplus(a) / (shape.chunks[l] if shape.options.reduce == "mean" else 1)


def errors(loss: Tensor, notes: Notes, *, through: bool = False, again: bool = False) -> dict[str, Factors]:
    """delta and x at every map that was noted, of a loss that the pass led to; `again` if its graph is read again.

    With `through` they keep a graph, so that what is learned can be learned through.
    """
    found = torch.autograd.grad(
        loss,
        [noted.y for noted in notes.values()],
        create_graph=through,
        retain_graph=through or again,
        materialize_grads=True,
    )
    made: dict[str, Factors] = {}
    for (name, noted), delta in zip(notes.items(), found, strict=True):
        x = noted.x if through else noted.x.detach()
        made[name] = Factors(delta.to(x.dtype), x)
    return made


def shorter(pair: Factors, most: float) -> Factors:
    """No token's delta longer than `most`, where it is not 0."""
    if not most:
        return pair
    size = pair.left.square().sum(-1, keepdim=True).clamp(min=1e-30).sqrt()
    return Factors(pair.left * (most / size).clamp(max=1), pair.right)


def cut(x: Tensor) -> Tensor:
    """The same numbers outside any graph, and outside inference mode."""
    return x.detach().clone() if x.is_inference() else x.detach()


def own_errors(params: Params, l: int, level: Level, z: Float[Tensor, "B T D"], way: Way) -> Pairs:
    """delta and x of ½‖MLP_l(κ) - ν‖² at every token, κ = l2(W_κ z); local, so no token waits for another."""
    through, dtype = way.through, wide(z.dtype)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
        own = {name: w.to(dtype) for name, w in params.tensors.items() if name.startswith(f"levels.{l}.")}
        if not through:
            own, level, z = {name: cut(w) for name, w in own.items()}, values.mapped(level, cut), cut(z)
        notes: Notes = {}
        loss = missed(Params(params.shape, own), l, level, z.to(dtype), notes).sum()
        found = errors(loss, notes, through=through)
    return {name.rpartition(".")[2]: pair for name, pair in found.items()}


def missed(
    params: Params, l: int, level: Level, z: Float[Tensor, "B T D"], notes: Notes | None = None
) -> Float[Tensor, "B T"]:
    """½‖MLP_l(κ) - ν‖² of every token."""
    w = params.tensors
    key = l2(F.linear(z, w[f"levels.{l}.key.weight"]))
    value = F.linear(z, w[f"levels.{l}.value.weight"])
    if params.shape.options.target == "start":
        value = value + mlp(params, l, None, None, key)
    return (mlp(params, l, level, notes, key) - value).square().sum(-1) / 2


def weighed(pair: Factors, step: Steps, units: bool) -> Factors:
    """step_t delta_t x_tᵀ as factors; for dgd the root of the step on both, inputs of length 1."""
    if not units:
        return Factors(pair.left * step[..., None], pair.right)
    size = pair.right.square().sum(-1, keepdim=True).clamp(min=1e-30).sqrt()
    root = (torch.where(step > 0, step, 1).sqrt() * (step > 0))[..., None]
    return Factors(pair.left * size * root, pair.right / size * root)


def gathered(params: Params, l: int, level: Level, pairs: Pairs, steps: list[Steps], way: Way) -> Level:
    """The level with these tokens' terms in its open chunk; `steps` of every level, 0 where a token is not live."""
    o, step = params.shape.options, steps[l]
    units = o.inner_optimizer == "dgd"
    more = {name: weighed(pair, step, units) for name, pair in pairs.items()}
    slower = {name: weighed(pairs[name], steps[l + 1], False) for name in level.gathered if name in pairs}
    moments = dict(level.moments)
    if "step" in moments:
        moments["step"] = moments["step"] + step.sum(1)
    if way.gradient == "none":
        more, slower, moments = values.detach(more), values.detach(slower), values.detach(moments)
    return replace(
        level,
        open={
            name: plus(level.open[name], more[name]) if units else grown(level.open[name], more[name]) for name in more
        },
        gathered={**level.gathered, **{name: grown(level.gathered[name], more) for name, more in slower.items()}},
        moments=moments,
    )


def grown(one: Change, other: Change) -> Change:
    """The sum, in the form that takes less."""
    return folded(plus(one, other))


def descended(params: Params, l: int, name: str, level: Level) -> tuple[Change, dict[str, Tensor]]:
    """What the inner optimizer takes from a map at the end of a chunk, and its moments."""
    o, terms, moments = params.shape.options, level.open[name], dict[str, Tensor]()
    if o.inner_optimizer == "dgd":
        assert isinstance(terms, Factors)
        moved = dense(level.moved[name])
        W = moved + start_of(params, l, name) if o.on == "weights" else moved
        return W - dgd_joint(W, terms.right, terms.left, 1.0, reduce="sum"), moments
    if o.inner_optimizer == "gd":
        return terms, moments
    m, g = level.moments[name], dense(terms)
    if o.inner_optimizer == "delta_momentum":
        moments[name] = delta_momentum(m, g, o.momentum, 1.0)
    else:
        moments[name] = momentum(torch.zeros_like(m), m, g, o.momentum, 1.0)[1]
    if o.inner_optimizer == "muon":
        return -level.moments["step"][:, None, None] * newton_schulz(moments[name]), moments
    return -moments[name], moments


def bounds(params: Params, l: int) -> dict[str, Tensor]:
    """The largest update of every map; one that starts at zero has the level's root mean square for its start."""
    starts = {name: start_of(params, l, name) for name in params.shape.maps}
    squares = {name: length(W[None]).square() for name, W in starts.items()}
    mean = torch.stack(list(squares.values())).sum(0) / sum(W.numel() for W in starts.values())
    clip = params.shape.options.clip
    return {
        name: clip * (torch.where(starts[name].any(), square, mean * starts[name].numel())).sqrt()
        for name, square in squares.items()
    }


def clipped(terms: Change, most: Tensor | None) -> Change:
    """Scaled down to the bound."""
    return terms if most is None else times(terms, (most / length(terms)).clamp(max=1))


def fired(params: Params, l: int, level: Level, way: Way) -> Level:
    """The level after the update that ends its chunk, in all rows."""
    shape, C = params.shape, params.shape.chunks[l]
    most = bounds(params, l) if shape.options.clip else {}
    moved: dict[str, Change] = {}
    moments: dict[str, Tensor] = {}
    for name in shape.maps:
        terms, new = descended(params, l, name, level)
        moments |= new
        moved[name] = folded(update(level.moved[name], clipped(terms, most.get(name)), C, C))
    if "step" in level.moments:
        moments["step"] = torch.zeros_like(level.moments["step"])
    new = replace(level, moved=moved, moments=moments, open=emptied(level.open, shape))
    new = replace(new, count=torch.zeros_like(level.count), updates=level.updates + 1)
    if way.gradient == "none":
        return values.detach(new)
    if way.gradient == "truncated" and way.horizon is not None:
        cut_here = level.updates % way.horizon == way.horizon - 1
        if bool(cut_here.all()):
            return values.detach(new)
        if bool(cut_here.any()):
            return values.mapped(new, lambda x: torch.where(_like(cut_here, x), x.detach(), x))
    return new


def _like(rows: Tensor, x: Tensor) -> Tensor:
    return rows.to(x.device).reshape(-1, *[1] * (x.ndim - 1))


def emptied(held: Mapping[str, Change], shape: Shape) -> dict[str, Change]:
    """No terms of any map."""
    found: dict[str, Change] = {}
    for name, change in held.items():
        like = change.left if isinstance(change, Factors) else change
        found[name] = nothing(len(like), *shape.sizes(name), like.detach())
    return found
