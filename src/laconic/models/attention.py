"""Multi-head attention over a KV cache by PyTorch's kernel: heads, masks, and the names of captured activations.

Grouped-query heads (arXiv:2305.13245), sliding window (arXiv:2310.06825). The equations are in `attention_backends`.

Symbols: q, k, v queries, keys, values; S cached slots; P = S + T; W window.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.models.ops.upcast_attention import should_upcast, upcast_attention

CaptureFn = Callable[[str, Tensor], Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_heads(x: Float[Tensor, "B T NE"], num_heads: int) -> Float[Tensor, "B n T E"]:
    return x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)


def repeat_heads(x: Float[Tensor, "B G P E"], H: int) -> Float[Tensor, "B H P E"]:
    """Repeat each key or value head for its H / G neighbouring query heads: 0, 0, 1, 1."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], 1)


def visibility_mask(valid: Bool[Tensor, "B P"], S: int, window: int | None) -> Bool[Tensor, "B T P"]:
    """Eq. C12: slot j is visible to query t if it is valid, j <= S + t, and within the last `window` valid slots."""
    slot = torch.arange(valid.shape[1], device=valid.device)
    visible = valid[:, None, :] & (slot <= slot[S:, None])
    if window is None:
        return visible
    n = valid.cumsum(1)
    return visible & (n[:, None, :] > n[:, S:, None] - window)


class AttentionMask(NamedTuple):
    """The mask of one forward pass, for layers with the same window, in the form each backend needs.

    `mask` is None where SDPA needs none: with `causal`, for plain causality on an empty cache; without it, for a single
    query that sees every slot.
    """

    causal: bool
    mask: Tensor | None
    visible: Bool[Tensor, "#B T P"] | None
    bias: Float[Tensor, "#B #T #P"] | None

    def of_last_queries(self, n: int, P: int, device: torch.device) -> "AttentionMask":
        """Return the mask of the last n queries over P slots; plain causality lets a single one see them all."""
        mask, visible, bias = (None if x is None else x[..., -n:, :] for x in (self.mask, self.visible, self.bias))
        if self.causal and n > 1:
            mask = torch.ones(1, 1, n, P, dtype=torch.bool, device=device).tril(P - n)
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

    With `all_valid` the tensor need not be read. With `sdpa_only` a visibility mask is not needed beside `causal`.
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
    return value


def capture(activations: dict[str, Tensor], layer: int, names: frozenset[str], name: str, value: Tensor) -> Tensor:
    """Store an activation as `name.layer` if it is among `names`; return it unchanged."""
    if name in names:
        activations[f"{name}.{layer}"] = value
    return value


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: AttentionMask, dropout: float
) -> Float[Tensor, "B T HE"]:
    """Compute attention by `scaled_dot_product_attention`.

    `is_causal` is used on an empty cache only, because SDPA aligns it to the upper left. On CUDA only the flash kernel
    accepts grouped heads without materialising the scores (half precision, no mask, E up to 256).
    """
    H = q.shape[1]
    is_grouped = k.shape[1] != H
    is_half = v.dtype in (torch.bfloat16, torch.float16)  # q can be float32: autocast does not cast RoPE's output
    if is_grouped and q.is_cuda and (mask.mask is not None or q.shape[-1] > 256 or not is_half):
        k, v = repeat_heads(k, H), repeat_heads(v, H)
        is_grouped = False
    attend = upcast_attention if is_half and should_upcast(q, k, v) else F.scaled_dot_product_attention
    c = attend(q, k, v, mask.mask, dropout, mask.causal, scale=scale, enable_gqa=is_grouped)
    return c.transpose(1, 2).flatten(2)
