"""Index arithmetic on memory slots: counts and ranks per segment, order, and budget.

B rows, M slots, N segments. Valid slots are in the order of their segments; the segment id of an invalid slot is -1.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Int
from torch import Tensor


def count_per_segment(segment_ids: Int[Tensor, "B M"], num_segments: int) -> Int[Tensor, "B N"]:
    """Count the valid slots of each segment."""
    counts = torch.zeros(len(segment_ids), num_segments + 1, dtype=torch.long, device=segment_ids.device)
    columns = segment_ids % (num_segments + 1)  # -1 becomes the last column, which is dropped
    return counts.scatter_add(1, columns, torch.ones_like(segment_ids))[:, :num_segments]


def rank_in_segment(
    valid: Bool[Tensor, "B M"], segment_ids: Int[Tensor, "B M"], num_segments: int
) -> Int[Tensor, "B M"]:
    """Return the position of each valid slot within its segment, from 0; -1 where a slot is not valid."""
    lengths = count_per_segment(segment_ids, num_segments)
    start = F.pad(lengths.cumsum(1) - lengths, (0, 1)).gather(1, segment_ids % (num_segments + 1))
    return (valid.cumsum(1) - 1 - start).masked_fill(~valid, -1)


def top_budget_mask(
    log_s: Float32[Tensor, "B M"], valid: Bool[Tensor, "B M"], ranks: Int[Tensor, "B M"], budget: int
) -> Bool[Tensor, "B M"]:
    """Eq. VL18: mark the `budget` valid slots with the largest s; ties go to the smaller rank, then earlier."""
    by_rank = ranks.masked_fill(~valid, valid.shape[1]).argsort(dim=1, stable=True)
    weight = log_s.masked_fill(~valid, -torch.inf).gather(1, by_rank)
    chosen = by_rank.gather(1, weight.argsort(dim=1, descending=True, stable=True))[:, :budget]
    return torch.zeros_like(valid).scatter(1, chosen, True)


def valid_first_order(valid: Bool[Tensor, "B M"]) -> Int[Tensor, "B M"]:
    """Return the column order that puts the valid slots of each row first and is otherwise stable."""
    return (~valid).long().argsort(dim=1, stable=True)
