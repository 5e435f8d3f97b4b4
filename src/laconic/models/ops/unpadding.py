"""Training without padding: everything but attention runs on the real tokens of a batch.

Symbols: N real tokens of the batch; the decoder's B, T, D, H, E.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MIN_PADDING = 0.1  # share of padding from which gathering the real tokens is worthwhile
PADDED_ACTIVATIONS = frozenset({"hidden", "q_rot", "k_rot", "k_cache", "v_cache", "context"})  # of their usual shape


class RealTokens(NamedTuple):
    """The real tokens of a padded batch [B, T], as one row [1, N]; `places` is where they stand among the B T."""

    places: Int[Tensor, " N"]
    B: int
    T: int

    def gather(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "1 N D"]:
        return x.flatten(0, 1).index_select(0, self.places)[None]

    def scatter(self, x: Float[Tensor, "1 N D"]) -> Float[Tensor, "B T D"]:
        """Put the vectors back to their positions; padding becomes zeros."""
        padded = x.new_zeros(self.B * self.T, x.shape[-1])
        return padded.index_copy(0, self.places, x[0]).view(self.B, self.T, -1)

    def scatter_heads(self, x: Float[Tensor, "1 H N E"]) -> Float[Tensor, "B H T E"]:
        H, E = x.shape[1], x.shape[3]
        return self.scatter(x.transpose(1, 2).flatten(2)).view(self.B, self.T, H, E).transpose(1, 2)


def find_real_tokens(mask: Bool[Tensor, "B T"], captured: frozenset[str]) -> RealTokens | None:
    """Return the real tokens of a batch.

    None without gradients, when compiling, if few positions are padding, or if a captured activation needs the padding.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not captured <= PADDED_ACTIVATIONS:
        return None
    places = mask.flatten().nonzero()[:, 0]
    is_worthwhile = 0 < len(places) <= (1 - MIN_PADDING) * mask.numel()
    return RealTokens(places, *mask.shape) if is_worthwhile else None
