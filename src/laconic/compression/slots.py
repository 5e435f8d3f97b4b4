"""Slots of a memory by where they stand: how many a block has, the place of each in its block, which come first.

B rows, M slots, N blocks, in whose order the live slots stand; the block of a dead slot is -1.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Int
from torch import Tensor


def count_per_segment(segment_ids: Int[Tensor, "B M"], num_segments: int) -> Int[Tensor, "B N"]:
    """Live slots of each of N blocks."""
    found = torch.zeros(len(segment_ids), num_segments + 1, dtype=torch.long, device=segment_ids.device)
    return found.scatter_add(1, segment_ids % (num_segments + 1), torch.ones_like(segment_ids))[
        :, :num_segments
    ]  # -1 is the last column


def rank_in_segment(
    valid: Bool[Tensor, "B M"], segment_ids: Int[Tensor, "B M"], num_segments: int
) -> Int[Tensor, "B M"]:
    """The place of each live slot in its block, from 0; -1 where dead."""
    lengths = count_per_segment(segment_ids, num_segments)
    before = F.pad(lengths.cumsum(1) - lengths, (0, 1))
    return (valid.cumsum(1) - 1 - before.gather(1, segment_ids % (num_segments + 1))).masked_fill(~valid, -1)


def top_budget_mask(
    log_s: Float32[Tensor, "B M"], valid: Bool[Tensor, "B M"], ranks: Int[Tensor, "B M"], budget: int
) -> Bool[Tensor, "B M"]:
    """Eq. VL18: the `budget` live slots of largest s; ties to the smaller rank, then to the earlier slot."""
    first = ranks.masked_fill(~valid, valid.shape[1]).argsort(dim=1, stable=True)
    weight = log_s.masked_fill(~valid, -torch.inf).gather(1, first)
    chosen = first.gather(1, weight.argsort(dim=1, descending=True, stable=True))[:, :budget]
    return torch.zeros_like(valid).scatter(1, chosen, True)


def valid_first_order(valid: Bool[Tensor, "B M"]) -> Int[Tensor, "B M"]:
    """The live slots of each row first, in the order they have."""
    return (~valid).long().argsort(dim=1, stable=True)
