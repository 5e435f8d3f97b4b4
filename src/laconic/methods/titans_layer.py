"""A Titans memory as a layer: vectors in, vectors out, with a state that is a value.

Titans arXiv:2501.00663; TNT arXiv:2511.07343 for memories that start again and a second one of larger chunks. `start`
and `advance` are pure; `Titans` holds what training changes and calls them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.core import state as values
from laconic.core.attention import wide
from laconic.core.state import Deep, Layer, Matrix
from laconic.methods.chunked import STRETCH, Reading, accept, counted, counts, read_along, stretched
from laconic.methods.delta import staying
from laconic.methods.fast_weights import (
    Memory,
    Rule,
    Start,
    Starts,
    Vectors,
    fresh,
)
from laconic.methods.learning_settings import Gradient
from laconic.methods.packing import Packed, firsts, integers, packed, unpacked
from laconic.methods.starts import half_life, hold, logit, normal
from laconic.methods.titans import PROJECTIONS, Titan, projections, recall
from laconic.methods.titans_shape import Options, Params, Shape

NORM = 1e-6


def start(params: Params, batch: int) -> Layer:
    """Nothing read: every count 0, every fast weight at its trained start."""
    shape, w = params
    o, like = shape.options, w["q_proj.weight"].detach()
    like = like.new_zeros(1, dtype=wide(like.dtype))
    tails = {name: like.new_zeros(batch, o.conv - 1, shape.width) for name in PROJECTIONS}
    if o.gates == "chunk":
        tails["chunk"] = like.new_zeros(batch, 1, shape.width)
    memory = {name: untouched(begun(w, name), batch, o.momentum, like) for name in shape.memories}
    return Layer(tails=tails, memory=memory)


def begun(w: Mapping[str, Tensor], name: str) -> Start | Starts:
    """The trained start of a memory, in the wide type."""
    if f"{name}.M" in w:
        return w[f"{name}.M"].to(wide(w[f"{name}.M"].dtype))
    W1, W2 = (w[f"{name}.{part}"] for part in ("W1", "W2"))
    return Starts(W1.to(wide(W1.dtype)), W2.to(wide(W2.dtype)))


def untouched(at: Start | Starts, batch: int, momentum: bool, like: Tensor) -> Matrix | Deep:
    """No change of a memory that starts there."""
    if isinstance(at, Starts):
        return Deep(*(fresh(batch, tuple(x.shape), momentum, like) for x in at))
    assert at is not None
    return fresh(batch, tuple(at.shape), momentum, like)


def advance(
    params: Params,
    state: Layer,
    x: Float[Tensor, "B T D"],
    *,
    live: Bool[Tensor, "B T"] | None = None,
    learn: bool = True,
    gradient: Gradient = "full",
    horizon: int | None = None,
) -> tuple[Float[Tensor, "B T D"], Layer]:
    """What the memory answers to every vector, without the residual, and the state after the last.

    With `learn` False nothing is written and nothing decays; only the convolutions move on. `gradient` says what of
    the outer loss flows through the writes, and never changes a value; `horizon` is in chunks, for "truncated".
    """
    shape, w = params
    accept("titans", shape.width, state, x, live, gradient, horizon)
    T = x.shape[1]
    if T > STRETCH and shape.options.reset_every is None:
        return stretched(partial(advance, params, learn=learn, gradient=gradient, horizon=horizon), state, x, live)
    x, live = opened(w, state, x, live, learn and shape.options.persistent > 0)
    rows = packed(x, live)
    vectors = projections(rows.x, w, state.tails, shape.heads, rows.lengths)
    tails = {**state.tails, **vectors.tails}
    with torch.autocast(x.device.type, enabled=False):
        if learn:
            inputs, tails = gated(params, state, rows, tails)
            how = Reading(gradient, horizon, resets(shape), shape.options.checkpoint)
            y, memory = remembered(params, state.memory, (*vectors[:3], *inputs), rows.lengths, how)
        else:
            memory = state.memory
            rule = Rule("zero", shape.options.read, gradient)
            y = sum_of([recall(begun(w, name), memory[name], vectors.q, rule) for name in shape.memories])
    y = unpacked(finished(y, rows.x, w), rows.order, live)
    return y[:, y.shape[1] - T :], replace(state, tails=tails, memory=memory)


def opened(
    w: Mapping[str, Tensor], state: Layer, x: Tensor, live: Tensor | None, persistent: bool
) -> tuple[Tensor, Tensor | None]:
    """Eq. 19: learned vectors before the first live one of every row that has learned nothing yet."""
    new = [row for row, n in enumerate(integers(counts(state.memory))) if n == 0] if persistent else []
    if not new:
        return x, live
    N, B = w["persistent"].shape[0], len(x)
    live = x.new_ones(x.shape[:2], dtype=torch.bool) if live is None else live
    first = torch.zeros(B, dtype=torch.bool, device=x.device)
    first[new] = True
    before = (first & live.any(1))[:, None].expand(B, N)
    return torch.cat([w["persistent"].to(x.dtype).expand(B, N, -1), x], 1), torch.cat([before, live], 1)


def gated(
    params: Params, state: Layer, rows: Packed, tails: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """keep, step and momentum of every head and token, and the tails after them."""
    (shape, w), o = params, params.shape.options
    x = rows.x.to(wide(rows.x.dtype))
    if o.gates == "chunk":
        x, tail = firsts(x, tails["chunk"], counts(state.memory), shape.chunk, rows.lengths)
        tails = {**tails, "chunk": tail}
    names = ("keep", "step", "momentum") if o.momentum else ("keep", "step")
    keep, step, *rest = (F.linear(x, w[f"{n}.weight"].to(x.dtype), w[f"{n}.bias"].to(x.dtype)).mT for n in names)
    return (staying(keep), o.step_max * step.sigmoid(), *map(staying, rest)), tails


def resets(shape: Shape) -> dict[str, int]:
    """The period of the local memory, if it has one."""
    n = shape.options.reset_every
    return {} if n is None else {"memory": n}


def remembered(
    params: Params, memory: Memory, inputs: tuple[Tensor, ...], lengths: tuple[int, ...] | None, how: Reading
) -> tuple[Vectors, Memory]:
    """What all memories answer together, each with its own chunk."""
    o = params.shape.options
    found: list[Vectors] = []
    moved: dict[str, Matrix | Deep] = {}
    for name in params.shape.memories:
        system = system_of(params, name, how.gradient, o.guard)
        own = how._replace(resets={k: n for k, n in how.resets.items() if k == name})
        read = side_by_side if own.resets and lengths is None else read_along
        y, part = read(system, {name: memory[name]}, inputs, lengths, own)
        found.append(y)
        moved[name] = part[name]
    return sum_of(found), moved


def system_of(params: Params, name: str, gradient: Gradient, guard: float) -> Titan:
    """One memory of the layer; a guard of 0 is none."""
    o = params.shape.options
    rule, start = Rule("zero", o.read, gradient), begun(params.tensors, name)
    return Titan(name, params.shape.memories[name], start, rule, o.factor, guard or None)


def side_by_side(
    system: Titan, memory: Memory, inputs: tuple[Tensor, ...], lengths: tuple[int, ...] | None, how: Reading
) -> tuple[Vectors, Memory]:
    """The same as `read_along` where all rows are at a reset: the spans between resets are read as rows of a batch."""
    period, count, B, T = how.resets[system.name], counts(memory), len(inputs[0]), inputs[0].shape[2]
    n = T // period
    if n < 2 or any(c % period for c in integers(count)):
        return read_along(system, memory, inputs, lengths, how)
    spans = tuple(
        x[:, :, : n * period].reshape(B, -1, n, period, *x.shape[3:]).transpose(1, 2).flatten(0, 1) for x in inputs
    )
    many = (count[:, None] + period * torch.arange(n)).flatten()
    part = counted(values.repeat(memory[system.name], n), many)
    y, after = read_along(system, {system.name: part}, spans, None, how)
    y = y.reshape(B, n, *y.shape[1:]).transpose(1, 2).flatten(2, 3)
    after = values.take(after, [n * row + n - 1 for row in range(B)])
    if n * period == T:
        return y, after
    rest, after = read_along(system, after, tuple(x[:, :, n * period :] for x in inputs), None, how)
    return torch.cat([y, rest], 2), after


def sum_of(parts: list[Vectors]) -> Vectors:
    """The answers of all memories."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def finished(y: Vectors, x: Float[Tensor, "B T D"], w: Mapping[str, Tensor]) -> Float[Tensor, "B T D"]:
    """Each head's answer brought to root mean square 1 and weighed, gated by the input, mixed by W_o."""
    y = y * (y.square().mean(-1, keepdim=True) + NORM).rsqrt()
    y = y.transpose(1, 2).flatten(2) * w["norm.weight"].to(y.dtype)
    gate = F.silu(F.linear(x, w["g_proj.weight"]))
    return F.linear(y.to(x.dtype) * gate, w["o_proj.weight"])


class Titans(nn.Module):
    """A memory in place of attention, for any vectors: `y, state = memory(x, state, live=live)`.

    Without a state it begins with none of the batch's rows having learned anything. The caller adds the residual.
    """

    def __init__(
        self, width: int, heads: int = 4, chunk: int = 64, options: Options | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        self.shape = Shape(width, heads, chunk, options or Options())
        hold(self, weights(self.shape, torch.Generator().manual_seed(seed)))

    @property
    def params(self) -> Params:
        """The shape and the tensors by name, as `start` and `advance` take them."""
        return Params(self.shape, dict(self.named_parameters()))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: Layer | None = None,
        *,
        live: Bool[Tensor, "B T"] | None = None,
        learn: bool = True,
        gradient: Gradient = "full",
        horizon: int | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Layer]:
        params = self.params
        state = start(params, len(x)) if state is None else state
        return advance(params, state, x, live=live, learn=learn, gradient=gradient, horizon=horizon)


def weights(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """What training begins with: projections and starts normal, gates at their bias alone, queries as keys.

    A key begins as the sum of its window, a query and a value as their own token, so that a token asked again finds
    what stood behind it. Taps drawn at random have to find each other's place first, and do so in some runs only.
    """
    o, D, E = shape.options, shape.width, shape.head
    w = {f"{name}_proj.weight": normal(generator, D, D, scale=D**-0.5) for name in ("k", "v", "g", "o")}
    w["q_proj.weight"] = w["k_proj.weight"].clone()
    own = torch.eye(o.conv)[-1].repeat(D, 1)
    w |= {"q_conv.weight": own, "k_conv.weight": torch.full((D, o.conv), o.conv**-0.5), "v_conv.weight": own.clone()}
    biases = {"keep": half_life(o.keep_half_life), "step": logit(o.first_step(shape.chunk) / o.step_max, "step_start")}
    if o.momentum:
        biases["momentum"] = logit(o.momentum_start, "momentum_start")
    for name, bias in biases.items():
        w |= {f"{name}.weight": torch.zeros(shape.heads, D), f"{name}.bias": torch.full((shape.heads,), bias)}
    for name in shape.memories:
        if o.depth == 1:
            w[f"{name}.M"] = normal(generator, shape.heads, E, E, scale=E**-0.5)
        else:
            hidden = o.hidden or E
            w[f"{name}.W1"] = normal(generator, shape.heads, E, hidden, scale=hidden**-0.5)
            w[f"{name}.W2"] = normal(generator, shape.heads, hidden, E, scale=E**-0.5)
    w["norm.weight"] = torch.ones(D)
    return w | ({"persistent": normal(generator, o.persistent, D, scale=1.0)} if o.persistent else {})
