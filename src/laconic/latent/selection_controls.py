"""Controls of R-KV: chain tokens selected by one of its scores, by their position, at random, or as results of steps.

Symbols and shapes are those of `latent.rkv`.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.batches import ReasoningBatch
from laconic.rng import uniform

Scores = Float[Tensor, "B G Nc"]


def score_control(policy: str, I: Scores, R: Scores, batch: ReasoningBatch, M: int, seed: int) -> Scores:
    """Return the scores S by which a policy other than "rkv" ranks the chain's columns; `seed` is that of "random"."""
    if policy in ("attention", "cosine"):
        return I if policy == "attention" else R
    if policy == "random":
        return draw_random_scores(batch, seed, I.shape[1])
    mask = batch.chain_mask
    of_column = {"results": mask, "crop": 1 - mask.cumsum(1), "uniform": mark_uniform_columns(mask, M)}
    return of_column[policy][:, None].expand_as(I).to(I.dtype)


def mark_uniform_columns(chain_mask: Bool[Tensor, "B Nc"], M: int) -> Bool[Tensor, "B Nc"]:
    """Mark the columns at positions round(linspace(0, N_C - 1, M))."""
    last = (chain_mask.sum(1, keepdim=True) - 1).clamp(min=0)
    chosen = (torch.arange(M, device=last.device, dtype=torch.float64) * last / max(M - 1, 1)).round().long()
    return ((chain_mask.cumsum(1) - 1)[:, :, None] == chosen[:, None]).any(-1) & chain_mask


def draw_random_scores(batch: ReasoningBatch, seed: int, heads: int) -> Scores:
    """Return numbers in [0, 1) keyed by seed, epoch, row and position in the chain; equal for all layers and heads."""
    row = batch.row_index.cpu().numpy()[:, None]
    draws = uniform(seed, batch.epoch, row, 0, 0, (batch.chain_mask.cumsum(1) - 1).cpu().numpy())
    return torch.tensor(draws, device=batch.chain_ids.device)[:, None].expand(-1, heads, -1)
