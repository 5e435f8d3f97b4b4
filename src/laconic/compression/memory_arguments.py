"""Arguments of the operations that memories share: rows, sizes, devices and dtypes, and the comparison of tensors."""

from collections.abc import Iterable, Sequence
from typing import SupportsIndex, cast

import torch
from jaxtyping import Shaped
from torch import Tensor

from laconic.errors import UsageError
from laconic.models.checkpoints.checkpoint_files import FLOAT_DTYPES
from laconic.models.checkpoints.weights import resolve_device

Target = torch.device | str | int | torch.dtype


def list_rows(rows: Sequence[int] | Shaped[Tensor, " R"], num_rows: int) -> list[int]:
    """Return the indices of rows as a list; a boolean mask of all rows gives those where it is True."""
    values: object = rows.cpu().numpy().tolist() if isinstance(rows, Tensor) else rows
    indices = list(cast(Iterable[int], values)) if isinstance(values, Iterable) else []
    if len(indices) == num_rows and all(isinstance(value, bool) for value in indices):
        indices = [row for row, is_selected in enumerate(indices) if is_selected]
    if not indices or not all(map(is_integer, indices)):
        raise UsageError(f"select_rows: give a list of at least one row number, as in select_rows([0]), not {values!r}")
    outside = next((row for row in indices if not 0 <= row < num_rows), None)
    if outside is not None:
        raise UsageError(f"row {outside} is out of range; the memory has {num_rows} rows, counted from 0")
    return list(map(int, indices))


def check_size(num: int, unit: str, minimum: int) -> None:
    """Raise `UsageError` if the number of slots or vectors to keep is not an integer from `minimum` on."""
    if not is_integer(num) or num < minimum:
        raise UsageError(f"cannot keep {num!r} {unit}; give an integer, {minimum} or more")


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, and not True or False."""
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def resolve_target(device: Target | None, dtype: torch.dtype | None) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the arguments of `to`, where a dtype may come first, as in `torch.Tensor.to`."""
    if isinstance(device, torch.dtype) and dtype is None:
        device, dtype = None, device
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise UsageError(f"dtype {dtype}: a memory holds floating-point numbers, such as torch.float32")
    return None if device is None else resolve_device(cast(torch.device | str | int, device)), dtype


def are_equal_tensors(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether tensors are equal bit for bit and in dtype; they may be on different devices."""
    return len(mine) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b.to(a.device)) for a, b in zip(mine, theirs, strict=True)
    )
