"""Interface to the processes that train together."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor, nn

from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory

JsonT = TypeVar("JsonT")
WriteFn = Callable[[ManifestWriter], None]


class Ranks(Protocol):
    """The processes of one run; rank r trains on rows `r::world_size` of a batch.

    All ranks make the same calls in the same order, except `wrap` and `scale_loss`.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a shard of parameters and optimizer."""
        ...

    def wrap(self, method: nn.Module) -> nn.Module:
        """Return the module to call in place of the method, so that gradients are summed over ranks."""
        ...

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss whose averaged gradients are sums over ranks."""
        ...

    def accumulate_gradients(self, module: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of forward and backward of one micro-batch; the last one reduces the gradients."""
        ...

    def gather_parameters(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which every rank has all parameters and may call the method on its own."""
        ...

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Return the sum over ranks."""
        ...

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        ...

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the global norm of all gradients."""
        ...

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Return the whole of a sharded tensor."""
        ...

    def all_gather(self, value: JsonT) -> list[JsonT]:
        """Return the value of every rank, in order."""
        ...

    def run_on_rank_zero(self, function: Callable[[], JsonT]) -> JsonT:
        """Call a function on rank 0 and return its result, or raise its error, on all ranks."""
        ...

    def lock_run(self, run: RunDirectory) -> AbstractContextManager[object]:
        """Return a context that holds the run's lock for all ranks."""
        ...

    def commit_step(
        self, run: RunDirectory, step: int, write: WriteFn, fingerprints: Mapping[str, str], expected_bytes: int
    ) -> Path:
        """Commit a step with the files of every rank, or none; see `RunDirectory.commit_step`."""
        ...


def map_over_ranks(ranks: Ranks, count: int, work: Callable[[list[int]], list[JsonT]]) -> list[JsonT]:
    """Split the indices 0 … count - 1 over ranks and return the results of all, in order.

    Args:
        ranks: Processes that share the work.
        count: Number of items.
        work: Map from a list of indices to a list of results.
    """
    results = ranks.all_gather(work(list(range(ranks.rank, count, ranks.world_size))))
    return [results[i % ranks.world_size][i // ranks.world_size] for i in range(count)]
