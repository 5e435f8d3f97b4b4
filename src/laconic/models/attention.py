"""Multi-head attention over a KV cache: scores, masks, probabilities, and three backends for the same result.

Attention (arXiv:1706.03762), grouped-query heads (arXiv:2305.13245), sliding window (arXiv:2310.06825).

Symbols: q, k, v queries, keys, values; a scores; p probabilities; S cached slots; P = S + T; W window.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from laconic.models.upcast_attention import should_upcast, upcast_attention

CaptureFn = Callable[[str, Tensor], Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_heads(x: Float[Tensor, "B T NE"], num_heads: int) -> Float[Tensor, "B n T E"]:
    """Split a projection into heads."""
    return x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)


def repeat_heads(x: Float[Tensor, "B G P E"], H: int) -> Float[Tensor, "B H P E"]:
    """Repeat each key or value head for its H / G neighbouring query heads: 0, 0, 1, 1."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], 1)


def attention_scores(
    q: Float[Tensor, "B H T E"], k: Float[Tensor, "B G P E"], scale: float
) -> Float[Tensor, "B H T P"]:
    """Eq. C11: a[b,h,t,j] = scale q[b,h,t] . k[b, floor(h / R), j]."""
    return scale * (q @ repeat_heads(k, q.shape[1]).transpose(-1, -2))


def visibility_mask(valid: Bool[Tensor, "B P"], S: int, window: int | None) -> Bool[Tensor, "B T P"]:
    """Eq. C12: slot j is visible to query t if it is valid, j <= S + t, and within the last `window` valid slots."""
    slot = torch.arange(valid.shape[1], device=valid.device)
    visible = valid[:, None, :] & (slot <= slot[S:, None])
    if window is None:
        return visible
    n = valid.cumsum(1)
    return visible & (n[:, None, :] > n[:, S:, None] - window)


def apply_bias_and_mask(
    a: Float[Tensor, "B H T P"],
    visible: Bool[Tensor, "#B T P"],
    bias: Float[Tensor, "#B #T #P"] | None,
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


class AttentionMask(NamedTuple):
    """The mask of one forward pass, for layers with the same window, in the form each backend needs.

    `causal` without `mask`: plain causality on an empty cache; neither of the two: a single query sees every slot.
    """

    causal: bool
    mask: Tensor | None
    visible: Bool[Tensor, "#B T P"] | None
    bias: Float[Tensor, "#B #T #P"] | None

    def of_last_query(self) -> "AttentionMask":
        """Return the mask of the last query alone, which plain causality lets see every slot."""
        mask, visible, bias = (None if x is None else x[..., -1:, :] for x in (self.mask, self.visible, self.bias))
        return AttentionMask(False, mask, visible, bias)


def build_attention_mask(
    valid: Bool[Tensor, "B P"],
    S: int,
    *,
    all_valid: bool,
    window: int | None,
    bias: Tensor | None,
    sdpa_only: bool,
    dtype: torch.dtype,
) -> AttentionMask:
    """Return the mask for one window: none where SDPA needs none, else boolean, or float if there is a bias.

    Args:
        valid: Real slots among cached and new ones.
        S: Number of cached slots.
        all_valid: Every slot is valid; known by the caller, so that the tensor need not be read.
        window: Sliding window of these layers.
        bias: Added to the scores.
        sdpa_only: No backend but SDPA runs, so a visibility mask is not needed beside `causal`.
        dtype: Dtype of a float mask.
    """
    P = valid.shape[1]
    T = P - S
    is_plain = all_valid and bias is None and (window is None or window >= P)
    causal = needs_no_mask = False
    if is_plain and T == 1:  # branches instead of expressions: SDPA needs a Python bool under torch.compile
        needs_no_mask = True
    elif is_plain and S == 0:
        causal = needs_no_mask = True
    if needs_no_mask and sdpa_only:
        return AttentionMask(causal, None, None, None)
    visible = visibility_mask(valid[:1] if all_valid else valid, S, window)
    if needs_no_mask:
        return AttentionMask(causal, None, visible, None)
    mask = visible[:, None]
    if bias is not None:
        mask = bias.to(dtype)[:, None].masked_fill(~mask, -math.inf)
    return AttentionMask(False, mask, visible, bias)


# queries, keys, values, scale, mask, dropout
AttentionBackend = Callable[[Tensor, Tensor, Tensor, float, AttentionMask, float], Tensor]


def capture_nothing(name: str, value: Tensor) -> Tensor:
    """Capture function of a pass that captures no activation."""
    return value


def capture(activations: dict[str, Tensor], layer: int, names: frozenset[str], name: str, value: Tensor) -> Tensor:
    """Store an activation as `name.layer` if it is among `names`; return it unchanged."""
    if name in names:
        activations[f"{name}.{layer}"] = value
    return value


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


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: AttentionMask, dropout: float
) -> Float[Tensor, "B T HE"]:
    """Compute the same by `scaled_dot_product_attention`.

    `is_causal` is used on an empty cache only, because SDPA aligns it to the upper left. On CUDA only the flash kernel
    accepts grouped heads without materialising the scores (half precision, no mask, E up to 256).
    """
    H = q.shape[1]
    grouped = k.shape[1] != H
    is_half = v.dtype in (torch.bfloat16, torch.float16)  # q can be float32: autocast does not cast RoPE's output
    if grouped and q.is_cuda and (mask.mask is not None or q.shape[-1] > 256 or not is_half):
        k, v, grouped = repeat_heads(k, H), repeat_heads(v, H), False
    attend = upcast_attention if is_half and should_upcast(q, k, v) else F.scaled_dot_product_attention
    c = attend(q, k, v, mask.mask, dropout, mask.causal, scale=scale, enable_gqa=grouped)
    return c.transpose(1, 2).flatten(2)


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
