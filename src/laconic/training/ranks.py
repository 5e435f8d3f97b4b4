"""Where a run depends on how many processes train together; one process alone is the default."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn


class Ranks(Protocol):
    """The processes of one run. Rank r takes rows `r::world` of a batch; sums of loss are divided by global totals."""

    rank: int
    world: int

    def wrap(self, method: nn.Module) -> nn.Module:
        """What is called in place of the method, so that gradients are summed over ranks."""
        ...

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that is descended, so that gradients come out as sums (where they are averaged: times world)."""
        ...

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch; only after the last one are gradients exchanged."""
        ...

    def sum(self, numbers: Tensor) -> Tensor:
        """Summed over ranks; NaN on one is NaN on all."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        ...

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The global norm of all gradients."""
        ...


class Alone:
    """One process."""

    rank, world = 0, 1

    def wrap(self, method: nn.Module) -> nn.Module:
        return method

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def sum(self, numbers: Tensor) -> Tensor:
        return numbers

    def any(self, flag: bool) -> bool:
        return flag

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)
