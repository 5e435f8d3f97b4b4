"""A self-modifying Titans memory as a layer: vectors in, vectors out, with a state that is a value.

Nested Learning arXiv:2512.24695, section 8. `start` and `advance` are pure; `SelfTitans` holds what training changes.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from laconic.core.attention import split_heads, wide
from laconic.core.errors import Usage
from laconic.core.state import Deep, Layer, Matrix
from laconic.methods.chunked import STRETCH, Reading, accept, read_along, stretched
from laconic.methods.fast_weights import Vectors, fresh
from laconic.methods.hope_learner import Learner
from laconic.methods.hope_shape import Options, Params, Shape
from laconic.methods.learning_settings import Gradient
from laconic.methods.packing import convolved, packed, unpacked
from laconic.methods.starts import half_life, hold, logit, normal, softplus_inverse
from laconic.methods.titans import l2
from laconic.methods.titans_layer import finished


def learner(params: Params, gradient: Gradient = "full") -> Learner:
    """The memories of a layer, in the wide type."""
    return Learner(params.shape, {name: w.to(wide(w.dtype)) for name, w in params.tensors.items()}, gradient)


def start(params: Params, batch: int) -> Layer:
    """Nothing read: every count 0, every fast weight at its trained start."""
    (shape, w), o = params, params.shape.options
    like = w["o_proj.weight"].detach()
    like = like.new_zeros(1, dtype=wide(like.dtype))
    tails = {"x": like.new_zeros(batch, o.conv - 1, shape.heads * shape.head)} if o.mix == "map" else {}
    memory: dict[str, Matrix | Deep] = {}
    for name in learner(params).states:
        square = (shape.heads, shape.head, shape.head)
        if f"{name}.W1" in w:
            memory[name] = Deep(*(fresh(batch, tuple(w[f"{name}.{W}"].shape), o.momentum, like) for W in ("W1", "W2")))
        else:
            memory[name] = fresh(batch, square, o.momentum, like)
    return Layer(tails=tails, memory=memory)


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

    With `learn` False nothing is written and nothing decays; only the convolution moves on. `gradient` says what of
    the outer loss flows through the writes, and never changes a value; `horizon` is in chunks, for "truncated".
    """
    accept("hope", params.shape.width, state, x, live, gradient, horizon)
    if x.shape[1] > STRETCH:
        return stretched(partial(advance, params, learn=learn, gradient=gradient, horizon=horizon), state, x, live)
    rows = packed(x, live)
    heads, q, tails = mixed(params, state, rows.x, rows.lengths)
    memories = learner(params, gradient)
    with torch.autocast(x.device.type, enabled=False):
        if learn:
            how = Reading(gradient, horizon, {}, params.shape.options.checkpoint)
            y, memory = read_along(memories, state.memory, (heads, q), rows.lengths, how)
        else:
            y, memory = memories.recall(state.memory, heads, q), state.memory
    y = unpacked(finished(y, rows.x, params.tensors), rows.order, live)
    return y, replace(state, tails=tails, memory=memory)


def mixed(
    params: Params, state: Layer, x: Float[Tensor, "B T D"], lengths: tuple[int, ...] | None
) -> tuple[Vectors, Vectors, dict[str, Tensor]]:
    """The input of every head, its static query, and the tail of the convolution."""
    (shape, w), o = params, params.shape.options
    dtype, tails = wide(x.dtype), dict(state.tails)
    heads = x.to(dtype)
    if o.mix == "map":
        y = F.linear(x, w["mix_proj.weight"]).to(dtype)
        y, tails["x"] = convolved(y, state.tails["x"], w["mix_conv.weight"], lengths)
        heads = F.silu(y)
    heads = split_heads(heads, shape.heads)
    if o.inner_query:
        return heads, heads, tails
    return heads, l2(split_heads(F.linear(x, w["q_proj.weight"]).to(dtype), shape.heads)), tails


class SelfTitans(nn.Module):
    """A self-modifying memory in place of attention: `y, state = layer(x, state, live=live)`.

    Without a state it begins with none of the batch's rows having learned anything. The caller adds the residual.
    """

    def __init__(
        self, width: int, heads: int = 4, head: int | None = None, options: Options | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        if head is None and (heads < 1 or width % heads):
            raise Usage(f"hope: width {width} does not divide by {heads} heads; give the width of a head")
        self.shape = Shape(width, heads, head or width // heads, options or Options())
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
    """What training begins with: projections and starts normal, rows of gates 0 so that their bias alone sets them."""
    o, D, H, E = shape.options, shape.width, shape.heads, shape.head
    w: dict[str, Tensor] = {}
    if o.mix == "map":
        w["mix_proj.weight"] = normal(generator, H * E, D, scale=D**-0.5)
        w["mix_conv.weight"] = normal(generator, H * E, o.conv, scale=o.conv**-0.5)
    if not o.inner_query:
        w["q_proj.weight"] = normal(generator, H * E, D, scale=D**-0.5)
    hidden = o.hidden or E
    for name in ("k", "v", "memory", *(("q",) if o.inner_query else ())):
        if o.memory == "mlp":
            w[f"{name}.W1"] = normal(generator, H, E, hidden, scale=hidden**-0.5)
            w[f"{name}.W2"] = normal(generator, H, hidden, E, scale=E**-0.5)
        else:
            w[f"{name}.M"] = normal(generator, H, E, E, scale=E**-0.5)
    for group in shape.groups:
        step = o.step_projections if group == "projections" else o.step_memory
        for name, bias in biases(o, step).items():
            w |= {f"{name}.{group}.weight": torch.zeros(H, E), f"{name}.{group}.bias": torch.full((H,), bias)}
    w["g_proj.weight"] = normal(generator, H * E, D, scale=D**-0.5)
    w["norm.weight"] = torch.ones(H * E)
    w["o_proj.weight"] = normal(generator, D, H * E, scale=(H * E) ** -0.5)
    return w | (recalling(shape, w) if o.begins == "window" else {})


def recalling(shape: Shape, w: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A key as that of the sum of its window, a query as the key of its own token, but for what is not linear in a key.

    So a token that is asked again finds what stood behind it.
    """
    H, E, D, conv = shape.heads, shape.head, shape.width, shape.options.conv
    k, one = w.get("k.M"), torch.eye(E)
    M = one if k is None else k + one if shape.options.memory == "affine" else k
    query = (M @ w["mix_proj.weight"].view(H, E, D)).flatten(0, 1)
    return {"mix_conv.weight": torch.full((H * E, conv), conv**-0.5), "q_proj.weight": query}


def biases(o: Options, step: float) -> dict[str, float]:
    """Where the gates of a group begin."""
    inverse = softplus_inverse(step) if o.step_form == "softplus" else logit(step / o.step_max, "step")
    found = {"keep": half_life(o.keep_half_life), "step": inverse}
    return found | ({"momentum": logit(o.momentum_start, "momentum_start")} if o.momentum else {})
