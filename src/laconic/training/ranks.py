"""Where a run depends on how many processes train together; one process alone is the default."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from laconic.core.manifest import Files
from laconic.core.runs import RunFolder

Said = TypeVar("Said")  # what JSON holds


class Ranks(Protocol):
    """The processes of one run. Rank r takes rows `r::world` of a batch; sums of loss are divided by global totals.

    Every call but `wrap` and `scaled` is made by all ranks, in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def sharded(self) -> bool:
        """Whether parameters and optimizer lie in shards, each rank holding its own."""
        ...

    def wrap(self, method: nn.Module) -> nn.Module:
        """What is called in place of the method, so that gradients are summed over ranks."""
        ...

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that is descended, so that gradients come out as sums (where they are averaged: times world)."""
        ...

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch; after the last one the gradients are those of all ranks."""
        ...

    def answering(self, module: nn.Module) -> AbstractContextManager[object]:
        """Inside, every rank has all parameters and may call the method as often as it likes, without gradients."""
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

    def whole(self, tensor: Tensor) -> Tensor:
        """What a tensor in shards is in all."""
        ...

    def exchange(self, value: Said) -> list[Said]:
        """What every rank says, by rank; anything JSON holds."""
        ...

    def first(self, function: Callable[[], Said]) -> Said:
        """What `function` gives on rank 0, which alone calls it; its error is the error of all."""
        ...

    def held(self, run: RunFolder) -> AbstractContextManager[object]:
        """The run's lock, held once for all ranks."""
        ...

    def commit(
        self, run: RunFolder, number: int, write: Callable[[Files], None], bound: Mapping[str, str], expected: int
    ) -> Path:
        """`RunFolder.commit` of what all ranks write: a step of every rank's files, or none."""
        ...


class Alone:
    """One process."""

    rank, world, sharded = 0, 1, False

    def wrap(self, method: nn.Module) -> nn.Module:
        return method

    def scaled(self, loss: Tensor) -> Tensor:
        return loss

    def accumulating(self, module: nn.Module, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def answering(self, module: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()

    def sum(self, numbers: Tensor) -> Tensor:
        return numbers

    def any(self, flag: bool) -> bool:
        return flag

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def exchange(self, value: Said) -> list[Said]:
        return [value]

    def first(self, function: Callable[[], Said]) -> Said:
        return function()

    def held(self, run: RunFolder) -> AbstractContextManager[object]:
        return run.held()

    def commit(
        self, run: RunFolder, number: int, write: Callable[[Files], None], bound: Mapping[str, str], expected: int
    ) -> Path:
        return run.commit(number, write, bound, expected)


def spread(ranks: Ranks, count: int, work: Callable[[list[int]], list[Said]]) -> list[Said]:
    """`work` of the places 0 … count - 1, each rank taking `rank::world`; all ranks get the results in order."""
    mine = work(list(range(ranks.rank, count, ranks.world)))
    found = ranks.exchange(mine)
    return [found[i % ranks.world][i // ranks.world] for i in range(count)]
