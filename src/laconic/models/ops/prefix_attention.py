"""Attention after a KV prefix: one call for each KV head, since every head has its own number of keys.

Shapes: R = H / G query heads share a KV head; n keys of a head's prefix; P cached and new positions.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.models.attention import AttentionBackend, AttentionMask
from laconic.models.kv_prefix import PrefixHead


def extend_mask(mask: AttentionMask, num_keys: int, valid: Bool[Tensor, "B n"] | None) -> AttentionMask:
    """Return the mask with `num_keys` more keys in front, which every query sees where they are `valid`."""
    assert mask.visible is not None
    visible = mask.visible
    if mask.mask is None and not mask.causal and valid is None:
        return AttentionMask(False, None, F.pad(visible, (num_keys, 0), value=True), None)
    if valid is None:
        visible = F.pad(visible, (num_keys, 0), value=True)
    else:
        T = visible.shape[1]
        visible = torch.cat([valid[:, None].expand(-1, T, -1), visible.expand(len(valid), -1, -1)], -1)
    if mask.bias is None or mask.mask is None:
        return AttentionMask(False, visible[:, None], visible, None)
    bias = F.pad(mask.bias.expand(-1, -1, mask.visible.shape[2]), (num_keys, 0))
    return AttentionMask(
        False, F.pad(mask.mask, (num_keys, 0)).masked_fill(~visible[:, None], -math.inf), visible, bias
    )


def attend_with_prefix(
    backend: AttentionBackend,
    q: Float[Tensor, "B H T E"],
    k: Float[Tensor, "B G P E"],
    v: Float[Tensor, "B G P E"],
    scale: float,
    mask: AttentionMask,
    dropout: float,
    prefix: Sequence[PrefixHead],
) -> Float[Tensor, "B T HE"]:
    """Run a backend for one KV head and its query heads at a time, with the prefix of the head before its keys."""
    contexts = list[Tensor]()
    for g, (queries, head) in enumerate(zip(q.chunk(len(prefix), 1), prefix, strict=True)):
        keys = torch.cat([head.keys, k[:, g]], 1)[:, None]
        values = torch.cat([head.values, v[:, g]], 1)[:, None]
        extended = extend_mask(mask, head.keys.shape[1], head.valid)
        contexts.append((head.attend or backend)(queries, keys, values, scale, extended, dropout))
    return torch.cat(contexts, 2)


def attend_by_head(
    q: Float[Tensor, "B G N E"],
    k: Float[Tensor, "B G P E"],
    v: Float[Tensor, "B G P E"],
    mask: Float[Tensor, "#B 1 #N P"] | Float[Tensor, "N P"] | None,
    scale: float,
    prefix: Sequence[PrefixHead],
) -> Float[Tensor, "B G N E"]:
    """Attend from N queries of each KV head to the prefix of the head and to its slots.

    The queries are those of one position or of several, whose query heads share the keys; `mask` is added to the scores
    of the slots.
    """
    contexts = list[Tensor]()
    for g, head in enumerate(prefix):
        keys = torch.cat([head.keys, k[:, g]], 1)[:, None]
        values = torch.cat([head.values, v[:, g]], 1)[:, None]
        bias = mask if mask is None else F.pad(mask, (head.keys.shape[1], 0))
        if head.valid is not None:
            bias = keys.new_zeros(len(keys), 1, 1, keys.shape[2]) if bias is None else bias
            bias = bias.masked_fill(F.pad(~head.valid, (0, k.shape[2]))[:, None, None], -math.inf)
        contexts.append(F.scaled_dot_product_attention(q[:, g : g + 1], keys, values, bias, scale=scale))
    return torch.cat(contexts, 1)
