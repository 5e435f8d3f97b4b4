"""Number of latents that a question needs: nested lengths, and a stop head that chooses one of them.

As for summary vectors (`compression.autocompressor`): training reads the first N of M latents, N drawn uniformly for
each row, and then freezes the model and trains a linear head on the latents' hidden states with PonderNet's expected
cost (arXiv:2107.05407). Latent m depends on those before it only, so its stop is known after m Jacobi iterations.

Symbols: M latents; a row keeps the first N of them; a_m the stop logit at latent m; beta the price of a latent.
Equation numbers are those of the ledger's page `halting`, with stops "after" a latent.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.batches import ReasoningBatch
from laconic.halting.estimators import first_slots_mask
from laconic.halting.stop_distribution import (
    draw_uniforms,
    length_by_quantile,
    solve_initial_bias,
    stop_logit,
    uniform_length,
)
from laconic.models.cache import KVCache

INITIAL_MEAN_FRACTION = 0.9  # E[N] / M before training, so that an untrained head keeps all latents
STOP_QUANTILE = 0.5  # a row keeps the median of its stop distribution


class StopHead(nn.Module):
    """Linear head on the hidden states of M latents.

    `lr_multiplier` is its learning rate relative to everything else; parameters are stored divided by it.
    """

    def __init__(
        self, width: int, num_latents: int, lr_multiplier: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.zeros(width, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
        self.lr_multiplier = lr_multiplier
        self.initial_bias = solve_initial_bias(INITIAL_MEAN_FRACTION, tuple(range(1, num_latents + 1)))

    def stop_logits(self, hidden_states: Float[Tensor, "B M D"]) -> Float[Tensor, "B M"]:
        """Eq. VL3: a_m = u . h_m + b; no gradient flows to the hidden states."""
        return stop_logit(self.u, self.b[0], hidden_states.detach(), self.initial_bias, self.lr_multiplier)

    @torch.no_grad()
    def count_latents(self, hidden_states: Float[Tensor, "B M D"]) -> Int[Tensor, " B"]:
        """Eq. VL15: N, the first latent at which half of the stop distribution is reached, else M."""
        return length_by_quantile(self.stop_logits(hidden_states), STOP_QUANTILE)


def draw_lengths(batch: ReasoningBatch, M: int, seed: int) -> Int[Tensor, " B"]:
    """Eq. VL23: N uniform over 1 to M for each row, the same in any batch."""
    u = draw_uniforms("nested", seed, batch.epoch, batch.row_index, 0, 1)[:, 0]
    return uniform_length(u, tuple(range(1, M + 1)))


def count_valid_latents(cache: KVCache, M: int) -> tuple[int, ...]:
    """Return how many of the M latents at the end of a cache each row has: all, or those that a stop head keeps."""
    return tuple(map(int, cache.valid[:, cache.S - M :].sum(1)))


def keep_first_latents(cache: KVCache, N: Int[Tensor, " B"], M: int) -> KVCache:
    """Return the cache with only the first N of the M latents at its end valid."""
    before: Bool[Tensor, "B S"] = cache.valid[:, : cache.S - M]
    return cache.with_valid(torch.cat([before, cache.valid[:, cache.S - M :] & first_slots_mask(N, M)], 1))
