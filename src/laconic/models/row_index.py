"""Rows of a cache or state, selected by their indices or by a boolean mask."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

RowIndex = Sequence[int] | Int[Tensor, " N"] | Bool[Tensor, " B"]


def build_row_index(rows: RowIndex, B: int) -> Int[Tensor, " N"]:
    """Return the indices of the selected rows of B: the given ones, or where a mask is True."""
    index = torch.as_tensor(rows)
    if index.dtype == torch.bool:
        if len(index) != B:
            raise ValueError(f"a mask of {len(index)} rows cannot select from {B}")
        return index.nonzero()[:, 0]
    index = index.long()  # before the comparisons, which torch does not have for uint16 and uint32
    out_of_range = index[(index < 0) | (index >= B)]
    if len(out_of_range):
        raise ValueError(f"row {int(out_of_range[0])} does not exist; rows are 0 to {B - 1}")
    return index
