"""Rows of ids of different lengths as one padded matrix."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class PaddedIds(NamedTuple):
    """Rows of ids with padding; `attention_mask` is True at real tokens."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]


def pad_rows(
    rows: Sequence[Sequence[int]],
    pad_value: int = 0,
    *,
    pad_left: bool = False,
    width: int | None = None,
    device: torch.device | str = "cpu",
) -> PaddedIds:
    """Pad rows of ids to [B, width], by default as wide as the longest, on the right or left."""
    width = max(map(len, rows), default=0) if width is None else width
    ids = torch.full((len(rows), width), pad_value, device="cpu")
    mask = torch.zeros(len(rows), width, dtype=torch.bool, device="cpu")
    for b, row in enumerate(rows):
        columns = slice(width - len(row), width) if pad_left else slice(0, len(row))
        ids[b, columns] = torch.tensor(row, dtype=torch.long, device="cpu")
        mask[b, columns] = True
    return PaddedIds(ids.to(device), mask.to(device))
