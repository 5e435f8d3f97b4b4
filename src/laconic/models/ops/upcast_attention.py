"""Attention in float32 for training in half precision on a CPU, whose backward kernel is slow there."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

MAX_UPCAST_SLOTS = 256  # with 512 slots, half precision is faster again (torch 2.13)


def should_upcast(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a backward pass through attention over few slots on a CPU may follow.

    With 74 slots it takes four times as long in bfloat16 as in float32.
    """
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return needs_gradient and v.device.type == "cpu" and v.shape[2] <= MAX_UPCAST_SLOTS


def upcast_attention(
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B G P E"],
    v: Float[Tensor, "B G P E"],
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
    enable_gqa: bool,
) -> Float[Tensor, "B H T E"]:
    """Compute `scaled_dot_product_attention` in float32, also under autocast; return it in the dtype of the values."""
    bias = mask.float() if mask is not None and mask.is_floating_point() else mask
    with torch.autocast("cpu", enabled=False):
        c = F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), bias, dropout, causal, scale=scale, enable_gqa=enable_gqa
        )
    return c.to(v.dtype)
