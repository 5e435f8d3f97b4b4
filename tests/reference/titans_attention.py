"""Titans with attention: memory as a layer (MAL), as a gate (MAG) and as context (MAC).

Titans arXiv:2501.00663 (21 to 31); the memory alone is LMM. Each function returns its outputs without the residual, and
the new state.

Symbols: p persistent vectors, h what the memory recalls, y the output of attention.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.models.attention import split_heads, visibility_mask
from laconic.models.cache import KVCache
from laconic.models.ops.attention_backends import attention_probabilities, attention_scores, weighted_values
from laconic.nested.recurrence.memory_cells import NORM_EPS
from laconic.nested.state import LayerState
from laconic.nested.titans.layer import Titans

Weights = Mapping[str, Tensor]
QKV = ("q", "k", "v")


def split_qkv(w: Weights, x: Float[Tensor, "B T D"], num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of every head."""
    q, k, v = (split_heads(F.linear(x, w[f"{name}_proj.weight"]), num_heads) for name in QKV)
    return q, k, v


def attend(w: Weights, q: Tensor, k: Tensor, v: Tensor, visible: Bool[Tensor, "B T P"]) -> Float[Tensor, "B T D"]:
    """Compute softmax attention over the visible positions, projected by W_o."""
    scores = attention_scores(q, k, q.shape[-1] ** -0.5).masked_fill(~visible[:, None], -torch.inf)
    return F.linear(weighted_values(attention_probabilities(scores), v), w["o_proj.weight"])


def sliding_window_attention(
    w: Weights,
    x: Float[Tensor, "B T D"],
    cache: KVCache | None,
    num_heads: int,
    window: int,
    attention_mask: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T D"], KVCache]:
    """Attend causally to the last `window` valid positions.

    Returns:
        The outputs, and a cache of the `window` - 1 positions that later ones may see.
    """
    valid = x.new_ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask
    q, k, v = split_qkv(w, x, num_heads)
    new = KVCache((k,), (v,), torch.zeros_like(valid, dtype=torch.long), valid)
    merged = new if cache is None else cache.append(new)
    visible = visibility_mask(merged.valid, merged.S - x.shape[1], window)
    y = attend(w, q, merged.keys[0], merged.values[0], visible)
    order = torch.sort(merged.valid.to(torch.uint8), stable=True, dim=1).indices  # valid slots to the right
    return y * valid[..., None], merged.gather_slots(order[:, max(0, merged.S - window + 1) :])


def rms_scale(x: Float[Tensor, "B T D"], gain: Float[Tensor, " D"]) -> Float[Tensor, "B T D"]:
    """Scale to root mean square 1, times a learned gain."""
    return x * (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * gain


def gate_output(y: Float[Tensor, "B T D"], m: Float[Tensor, "B T D"], w: Weights) -> Float[Tensor, "B T D"]:
    """Compute y ⊗ m, SiLU of the product of both sides, each normalized with its own gain."""
    return F.silu(rms_scale(y, w["attention_norm.weight"]) * rms_scale(m, w["memory_norm.weight"]))


def mal(
    layer: Titans,
    w: Weights,
    state: LayerState,
    x: Float[Tensor, "B T D"],
    window: int,
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    update_weights: bool = True,
) -> tuple[Float[Tensor, "B T D"], LayerState]:
    """Eq. 29-31: memory as a layer, window attention over M([p, x])."""
    y, state = layer(x, state, attention_mask=attention_mask, update_weights=update_weights)
    o, cache = sliding_window_attention(w, y, state.cache, layer.shape.num_heads, window, attention_mask)
    return o, replace(state, cache=cache)


def mag(
    layer: Titans,
    w: Weights,
    state: LayerState,
    x: Float[Tensor, "B T D"],
    window: int,
    *,
    attention_mask: Bool[Tensor, "B T"] | None = None,
    update_weights: bool = True,
) -> tuple[Float[Tensor, "B T D"], LayerState]:
    """Eq. 26-28: memory as a gate, attention(x) ⊗ M([p, x])."""
    y, cache = sliding_window_attention(w, x, state.cache, layer.shape.num_heads, window, attention_mask)
    m, state = layer(x, state, attention_mask=attention_mask, update_weights=update_weights)
    return gate_output(y, m, w), replace(state, cache=cache)


def mac(
    layer: Titans, w: Weights, state: LayerState, segment: Float[Tensor, "B T D"]
) -> tuple[Float[Tensor, "B T D"], LayerState]:
    """Eq. 21-25: memory as context, y = attention([p, h, x]) with h = M(x) from before; then y ⊗ M(y), y is written."""
    B, T, _ = segment.shape
    h, _ = layer(segment, state, update_weights=False)
    p = w["persistent"].to(segment.dtype).expand(B, -1, -1)
    q, k, v = split_qkv(w, torch.cat([p, h, segment], 1), layer.shape.num_heads)
    causal = torch.ones(T, T, dtype=torch.bool, device=segment.device).tril()
    always = causal.new_ones(T, p.shape[1])
    visible = torch.cat([always, causal, causal], 1).expand(B, -1, -1)
    y = attend(w, q[:, :, p.shape[1] + T :], k, v, visible)
    m, state = layer(y, state)
    return gate_output(y, m, w), state
