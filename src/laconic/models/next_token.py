"""The last token of each row, and the most likely next one.

Shapes: B rows, T positions, X any width, V vocabulary.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.models.attention import accumulation_dtype


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
