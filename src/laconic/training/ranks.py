"""Where a run depends on how many processes train together; one process alone is the default."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory

JsonT = TypeVar("JsonT")  # what JSON holds


class Ranks(Protocol):
    """The processes of one run. Rank r takes rows `r::world` of a batch; sums of loss are divided by global totals.

    Every call but `wrap` and `scaled` is made by all ranks, in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def is_sharded(self) -> bool:
        """Whether parameters and optimizer lie in shards, each rank holding its own."""
        ...

    def wrap(self, method: nn.Module) -> nn.Module:
        """What is called in place of the method, so that gradients are summed over ranks."""
        ...

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss that is descended, so that gradients come out as sums (where they are averaged: times world)."""
        ...

    def accumulate_gradients(self, module: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch; after the last one the gradients are those of all ranks."""
        ...

    def gather_parameters(self, module: nn.Module) -> AbstractContextManager[object]:
        """Inside, every rank has all parameters and may call the method as often as it likes, without gradients."""
        ...

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Summed over ranks; NaN on one is NaN on all."""
        ...

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        ...

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """The global norm of all gradients."""
        ...

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """What a tensor in shards is in all."""
        ...

    def all_gather(self, value: JsonT) -> list[JsonT]:
        """What every rank says, by rank; anything JSON holds."""
        ...

    def run_on_rank_zero(self, function: Callable[[], JsonT]) -> JsonT:
        """What `function` gives on rank 0, which alone calls it; its error is the error of all."""
        ...

    def lock_run(self, run: RunDirectory) -> AbstractContextManager[object]:
        """The run's lock, held once for all ranks."""
        ...

    def commit_step(
        self,
        run: RunDirectory,
        step: int,
        write: Callable[[ManifestWriter], None],
        fingerprints: Mapping[str, str],
        expected_bytes: int,
    ) -> Path:
        """`RunFolder.commit` of what all ranks write: a step of every rank's files, or none."""
        ...


class SingleProcess:
    """One process."""

    rank, world_size, is_sharded = 0, 1, False

    def wrap(self, method: nn.Module) -> nn.Module:
        return method

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def accumulate_gradients(self, module: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def gather_parameters(self, module: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        return numbers

    def any_rank(self, flag: bool) -> bool:
        return flag

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def full_tensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, value: JsonT) -> list[JsonT]:
        return [value]

    def run_on_rank_zero(self, function: Callable[[], JsonT]) -> JsonT:
        return function()

    def lock_run(self, run: RunDirectory) -> AbstractContextManager[object]:
        return run.lock()

    def commit_step(
        self,
        run: RunDirectory,
        step: int,
        write: Callable[[ManifestWriter], None],
        fingerprints: Mapping[str, str],
        expected_bytes: int,
    ) -> Path:
        return run.commit_step(step, write, fingerprints, expected_bytes)


def map_over_ranks(ranks: Ranks, count: int, work: Callable[[list[int]], list[JsonT]]) -> list[JsonT]:
    """`work` of the places 0 … count - 1, each rank taking `rank::world`; all ranks get the results in order."""
    mine = work(list(range(ranks.rank, count, ranks.world_size)))
    found = ranks.all_gather(mine)
    return [found[i % ranks.world_size][i // ranks.world_size] for i in range(count)]
