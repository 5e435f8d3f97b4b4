"""A Titans memory beside attention: as a layer before it, as a gate on it, as its context.

Titans arXiv:2501.00663 (21 to 31). Functions over a memory of `titans_layer.py` and the attention of core; alone the
memory is LMM. Each gives its answers, without the residual, and the state after them.

Symbols: p persistent vectors, h what the memory recalls, y what attention gives, W positions of a window.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.core.attention import context, probabilities, scores, seen, split_heads
from laconic.core.cache import Cache
from laconic.core.state import Layer
from laconic.methods.titans_layer import NORM, advance
from laconic.methods.titans_shape import Params

Weights = Mapping[str, Tensor]
PARTS = ("q", "k", "v")


def split(w: Weights, x: Float[Tensor, "B T D"], heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every head."""
    q, k, v = (split_heads(F.linear(x, w[f"{name}_proj.weight"]), heads) for name in PARTS)
    return q, k, v


def attended(w: Weights, q: Tensor, k: Tensor, v: Tensor, visible: Bool[Tensor, "B T P"]) -> Float[Tensor, "B T D"]:
    """Softmax attention over what is visible, mixed by W_o."""
    a = scores(q, k, q.shape[-1] ** -0.5).masked_fill(~visible[:, None], -torch.inf)
    return F.linear(context(probabilities(a), v), w["o_proj.weight"])


def windowed(
    w: Weights,
    x: Float[Tensor, "B T D"],
    held: Cache | None,
    heads: int,
    window: int,
    live: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T D"], Cache]:
    """Causal attention over the last `window` live vectors, and the `window` - 1 that the next ones may see."""
    live = x.new_ones(x.shape[:2], dtype=torch.bool) if live is None else live
    q, k, v = split(w, x, heads)
    new = Cache((k,), (v,), torch.zeros_like(live, dtype=torch.long), live)
    whole = new if held is None else held.append(new)
    y = attended(w, q, whole.keys[0], whole.values[0], seen(whole.live, whole.S - x.shape[1], window))
    order = torch.sort(whole.live.to(torch.uint8), stable=True, dim=1).indices  # what is live to the right
    kept = order[:, max(0, whole.S - window + 1) :]
    return y * live[..., None], whole.keep(kept)


def scaled(x: Float[Tensor, "B T D"], gain: Float[Tensor, " D"]) -> Float[Tensor, "B T D"]:
    """Root mean square 1, times a learned gain."""
    return x * (x.square().mean(-1, keepdim=True) + NORM).rsqrt() * gain


def gated(y: Float[Tensor, "B T D"], m: Float[Tensor, "B T D"], w: Weights) -> Float[Tensor, "B T D"]:
    """y ⊗ m: each normalised with a gain of its own, their product through SiLU."""
    return F.silu(scaled(y, w["attention_norm.weight"]) * scaled(m, w["memory_norm.weight"]))


def mal(
    params: Params,
    w: Weights,
    state: Layer,
    x: Float[Tensor, "B T D"],
    window: int,
    *,
    live: Bool[Tensor, "B T"] | None = None,
    learn: bool = True,
) -> tuple[Float[Tensor, "B T D"], Layer]:
    """Eq. 29-31: memory as a layer, window attention over M([p, x])."""
    y, after = advance(params, state, x, live=live, learn=learn)
    o, held = windowed(w, y, state.cache, params.shape.heads, window, live)
    return o, replace(after, cache=held)


def mag(
    params: Params,
    w: Weights,
    state: Layer,
    x: Float[Tensor, "B T D"],
    window: int,
    *,
    live: Bool[Tensor, "B T"] | None = None,
    learn: bool = True,
) -> tuple[Float[Tensor, "B T D"], Layer]:
    """Eq. 26-28: memory as a gate, attention(x) ⊗ M([p, x])."""
    y, held = windowed(w, x, state.cache, params.shape.heads, window, live)
    m, after = advance(params, state, x, live=live, learn=learn)
    return gated(y, m, w), replace(after, cache=held)


def mac(
    params: Params, w: Weights, state: Layer, segment: Float[Tensor, "B T D"]
) -> tuple[Float[Tensor, "B T D"], Layer]:
    """Eq. 21-25: memory as context, y = attention([p, h, x]) with h = M(x) from before; then y ⊗ M(y), y written."""
    B, T, _ = segment.shape
    h, _ = advance(params, state, segment, learn=False)
    p = w["persistent"].to(segment.dtype).expand(B, -1, -1)
    q, k, v = split(w, torch.cat([p, h, segment], 1), params.shape.heads)
    causal = torch.ones(T, T, dtype=torch.bool, device=segment.device).tril()
    always = causal.new_ones(T, p.shape[1])
    visible = torch.cat([always, causal, causal], 1).expand(B, -1, -1)
    y = attended(w, q[:, :, p.shape[1] + T :], k, v, visible)
    m, after = advance(params, state, y)
    return gated(y, m, w), after
