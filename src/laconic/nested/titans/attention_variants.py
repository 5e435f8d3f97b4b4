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

from laconic.models.attention import (
    attention_probabilities,
    attention_scores,
    split_heads,
    visibility_mask,
    weighted_values,
)
from laconic.models.cache import KVCache
from laconic.nested.state import LayerState
from laconic.nested.titans.config import TitansParams
from laconic.nested.titans.layer import NORM_EPS, forward_with_state

Weights = Mapping[str, Tensor]
QKV = ("q", "k", "v")


def split_qkv(w: Weights, x: Float[Tensor, "B T D"], num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every head."""
    q, k, v = (split_heads(F.linear(x, w[f"{name}_proj.weight"]), num_heads) for name in QKV)
    return q, k, v


def attend(w: Weights, q: Tensor, k: Tensor, v: Tensor, visible: Bool[Tensor, "B T P"]) -> Float[Tensor, "B T D"]:
    """Softmax attention over what is visible, mixed by W_o."""
    a = attention_scores(q, k, q.shape[-1] ** -0.5).masked_fill(~visible[:, None], -torch.inf)
    return F.linear(weighted_values(attention_probabilities(a), v), w["o_proj.weight"])


def sliding_window_attention(
    w: Weights,
    x: Float[Tensor, "B T D"],
    cache: KVCache | None,
    num_heads: int,
    window: int,
    attention_mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T D"], KVCache]:
    """Causal attention over the last `window` live vectors, and the `window` - 1 that the next ones may see."""
    attention_mask = x.new_ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask
    q, k, v = split_qkv(w, x, num_heads)
    new = KVCache((k,), (v,), torch.zeros_like(attention_mask, dtype=torch.long), attention_mask)
    whole = new if cache is None else cache.append(new)
    y = attend(w, q, whole.keys[0], whole.values[0], visibility_mask(whole.valid, whole.S - x.shape[1], window))
    order = torch.sort(whole.valid.to(torch.uint8), stable=True, dim=1).indices  # what is live to the right
    kept = order[:, max(0, whole.S - window + 1) :]
    return y * attention_mask[..., None], whole.gather_slots(kept)


def rms_scale(x: Float[Tensor, "B T D"], gain: Float[Tensor, " D"]) -> Float[Tensor, "B T D"]:
    """Root mean square 1, times a learned gain."""
    return x * (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * gain


def gate_output(y: Float[Tensor, "B T D"], m: Float[Tensor, "B T D"], w: Weights) -> Float[Tensor, "B T D"]:
    """y ⊗ m: each normalised with a gain of its own, their product through SiLU."""
    return F.silu(rms_scale(y, w["attention_norm.weight"]) * rms_scale(m, w["memory_norm.weight"]))


def mal(
    params: TitansParams,
    w: Weights,
    state: LayerState,
    x: Float[Tensor, "B T D"],
    window: int,
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    update_weights: bool = True,
) -> tuple[Float[Tensor, "B T D"], LayerState]:
    """Eq. 29-31: memory as a layer, window attention over M([p, x])."""
    y, after = forward_with_state(params, state, x, attention_mask=attention_mask, update_weights=update_weights)
    o, held = sliding_window_attention(w, y, state.cache, params.shape.num_heads, window, attention_mask)
    return o, replace(after, cache=held)


def mag(
    params: TitansParams,
    w: Weights,
    state: LayerState,
    x: Float[Tensor, "B T D"],
    window: int,
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    update_weights: bool = True,
) -> tuple[Float[Tensor, "B T D"], LayerState]:
    """Eq. 26-28: memory as a gate, attention(x) ⊗ M([p, x])."""
    y, held = sliding_window_attention(w, x, state.cache, params.shape.num_heads, window, attention_mask)
    m, after = forward_with_state(params, state, x, attention_mask=attention_mask, update_weights=update_weights)
    return gate_output(y, m, w), replace(after, cache=held)


def mac(
    params: TitansParams, w: Weights, state: LayerState, segment: Float[Tensor, "B T D"]
) -> tuple[Float[Tensor, "B T D"], LayerState]:
    """Eq. 21-25: memory as context, y = attention([p, h, x]) with h = M(x) from before; then y ⊗ M(y), y written."""
    B, T, _ = segment.shape
    h, _ = forward_with_state(params, state, segment, update_weights=False)
    p = w["persistent"].to(segment.dtype).expand(B, -1, -1)
    q, k, v = split_qkv(w, torch.cat([p, h, segment], 1), params.shape.num_heads)
    causal = torch.ones(T, T, dtype=torch.bool, device=segment.device).tril()
    always = causal.new_ones(T, p.shape[1])
    visible = torch.cat([always, causal, causal], 1).expand(B, -1, -1)
    y = attend(w, q[:, :, p.shape[1] + T :], k, v, visible)
    m, after = forward_with_state(params, state, y)
    return gate_output(y, m, w), after
