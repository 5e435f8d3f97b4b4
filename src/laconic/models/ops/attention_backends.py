"""Attention written as equations, which specifies the result; the same by flex attention; and the table of backends.

Attention (arXiv:1706.03762), grouped-query heads (arXiv:2305.13245).

Symbols: q, k, v queries, keys, values; a scores; p probabilities.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from laconic.models.attention import (
    AttentionMask,
    CaptureFn,
    accumulation_dtype,
    capture_nothing,
    repeat_heads,
    sdpa_attention,
)


def attention_scores(
    q: Float[Tensor, "B H T E"], k: Float[Tensor, "B G P E"], scale: float
) -> Float[Tensor, "B H T P"]:
    """Eq. C11: a[b,h,t,j] = scale q[b,h,t] . k[b, floor(h / R), j]."""
    return scale * (q @ repeat_heads(k, q.shape[1]).transpose(-1, -2))


def apply_bias_and_mask(
    a: Float[Tensor, "B H T P"], visible: Bool[Tensor, "#B T P"], bias: Float[Tensor, "#B #T #P"] | None
) -> Float[Tensor, "B H T P"]:
    """Eq. C13: a + bias, then minus infinity where not visible."""
    a = a if bias is None else a + bias.to(a.dtype)[:, None]
    return a.masked_fill(~visible[:, None], -math.inf)


def attention_probabilities(a: Float[Tensor, "B H T P"]) -> Float[Tensor, "B H T P"]:
    """Eq. C14: softmax over keys in accumulation precision; all zeros for a query that sees no slot."""
    sees_nothing = (a == -math.inf).all(-1, keepdim=True)
    p = a.masked_fill(sees_nothing, 0.0).softmax(-1, dtype=accumulation_dtype(a.dtype))
    return p.masked_fill(sees_nothing, 0.0).to(a.dtype)


def weighted_values(p: Float[Tensor, "B H T P"], v: Float[Tensor, "B G P E"]) -> Float[Tensor, "B T HE"]:
    """Eq. C15: c = p v, heads concatenated."""
    return (p @ repeat_heads(v, p.shape[1])).transpose(1, 2).flatten(2)


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: AttentionMask,
    dropout: float,
    capture: CaptureFn = capture_nothing,
) -> Float[Tensor, "B T HE"]:
    """Compute equations C11 to C15 as written: the specification of the other backends."""
    assert mask.visible is not None
    a = capture("scores", attention_scores(q, k, scale))
    a = capture("scores_seen", apply_bias_and_mask(a, mask.visible, mask.bias))
    p = capture("probs", attention_probabilities(a))
    return weighted_values(F.dropout(p, dropout) if dropout else p, v)


def flex_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: AttentionMask, dropout: float
) -> Float[Tensor, "B T HE"]:
    """Compute the same by `flex_attention`, which has no dropout, and no gradient on the CPU."""
    if not q.is_cuda and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("flex attention has no gradient on the CPU; use sdpa")
    if dropout:
        raise ValueError("flex attention has no dropout; set dropout to 0 or use sdpa")
    assert mask.visible is not None
    bias = torch.zeros_like(mask.visible, dtype=q.dtype) if mask.bias is None else mask.bias.to(q.dtype)
    bias = bias.masked_fill(~mask.visible, -math.inf).expand(q.shape[0], q.shape[2], k.shape[2])
    grouped = q.shape[1] != k.shape[1]
    c = flex_attention(q, k, v, lambda a, b, h, t, j: a + bias[b, t, j], scale=scale, enable_gqa=grouped)
    assert isinstance(c, Tensor)
    return c.transpose(1, 2).flatten(2)


ATTENTION_BACKENDS = {"sdpa": sdpa_attention, "eager": eager_attention, "flex": flex_attention_forward}
