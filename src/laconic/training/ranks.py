"""The processes that train together: this one alone, or those that `training.distributed` joins."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory

JsonT = TypeVar("JsonT")
WriteFn = Callable[[ManifestWriter], None]


class Ranks:
    """The processes of one run, here this one alone; `DistributedRanks` overrides what several need.

    Rank r trains on rows `r::world_size` of a batch. All ranks make the same calls in the same order.
    """

    rank, world_size = 0, 1
    is_sharded = False  # whether each rank holds a shard of parameters and optimizer

    def wrap(self, method: nn.Module) -> nn.Module:
        """Return the module to call in place of the method, so that gradients are summed over ranks."""
        return method

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Scale the loss so that DDP, which averages gradients over ranks, gives their sum."""
        return loss

    def accumulate_gradients(self, module: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of forward and backward of one micro-batch; the last one reduces the gradients."""
        return nullcontext()

    def gather_parameters(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which every rank has all parameters and may call the method on its own."""
        return nullcontext()

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        return numbers

    def any_rank(self, flag: bool) -> bool:
        return bool(self.all_reduce_sum(torch.tensor(float(flag))).item())

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def all_gather(self, value: JsonT) -> list[JsonT]:
        return [value]

    def run_on_rank_zero(self, function: Callable[[], JsonT]) -> JsonT:
        """Call a function on rank 0 and return its result, or raise its error, on all ranks."""
        return function()

    def lock_run(self, run: RunDirectory) -> AbstractContextManager[object]:
        """Return a context that holds the run's lock for all ranks."""
        return run.lock()

    def commit_step(
        self, run: RunDirectory, step: int, write: WriteFn, fingerprints: Mapping[str, str], expected_bytes: int
    ) -> Path:
        """Commit a step with the files of every rank, or none; see `RunDirectory.commit_step`."""
        return run.commit_step(step, write, fingerprints, expected_bytes)
