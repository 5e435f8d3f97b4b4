"""Training in a single process."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from laconic.storage.run_dir import RunDirectory
from laconic.training.ranks import JsonT, WriteFn


class SingleProcess:
    """The only rank of a run; see `Ranks`."""

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
        self, run: RunDirectory, step: int, write: WriteFn, fingerprints: Mapping[str, str], expected_bytes: int
    ) -> Path:
        return run.commit_step(step, write, fingerprints, expected_bytes)
