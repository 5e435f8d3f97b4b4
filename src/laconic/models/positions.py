"""Position ids, learned position embeddings, and the choice of the next token.

Learned positions as in GPT-2 and OPT (arXiv:2205.01068).

Symbols: p position, -1 for none; only valid slots count as positions; V vocabulary.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.models.attention import accumulation_dtype


def position_embedding(table: Float[Tensor, "N D"], p: Int[Tensor, "B T"], offset: int) -> Float[Tensor, "B T D"]:
    """Eq. C8: row p + offset of the table, and the zero vector where p = -1."""
    return F.embedding(p.clamp(min=0) + offset, table).masked_fill((p < 0)[..., None], 0.0)


def default_position_ids(
    attention_mask: Bool[Tensor, "B T"],
    past_positions: Int[Tensor, "B S"],
    past_valid: Bool[Tensor, "B S"],
    num_prefix_tokens: Int[Tensor, " B"] | None = None,
) -> Int[Tensor, "B T"]:
    """Eq. C22: count on from the largest valid cached position, or from the prefix, or from 0; padding gets 0."""
    first = 1 + F.pad(past_positions.masked_fill(~past_valid, -1), (1, 0), value=-1).amax(1)
    first = first if num_prefix_tokens is None else first.maximum(num_prefix_tokens)
    return (first[:, None] + attention_mask.cumsum(1) - 1) * attention_mask


def last_valid(x: Float[Tensor, "B T X"], attention_mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B X"]:
    """Return the entry of each row's last real token."""
    slot = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    last = (slot * attention_mask).amax(1)
    return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]


def next_token(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """Eq. C21: the most likely id, the lowest on a tie."""
    return logits.argmax(-1)


def next_token_probabilities(logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
    """Eq. C21: softmax over the vocabulary in accumulation precision."""
    return logits.softmax(-1, dtype=accumulation_dtype(logits.dtype))
