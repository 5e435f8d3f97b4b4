"""Several ranks: what torchrun started, gradients summed by DDP or FSDP2, steps committed by all ranks or none.

Replicated (arXiv:2006.15704): every rank holds all. Sharded (arXiv:2304.11277): parameters, gradients and optimizer
in shards. A method calls each block several times before one backward, and on some data more often than on other; so
blocks are gathered once a micro-batch, kept until all gradients are reduced, and only then let go.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from laconic.config.training import TrainingConfig
from laconic.errors import LaconicError, UsageError, translate_os_errors
from laconic.interfaces import StepOutput
from laconic.models.decoder import Decoder
from laconic.storage.manifest import FileEntry, ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training.rank_sync import RankChannel
from laconic.training.ranks import Ranks, SingleProcess

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

JsonT = TypeVar("JsonT")
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # of a collective; a rank may validate or save for long
FSDP_VIEW_WARNING = "FSDP2-wrapped module"  # keys and values are views of one product; nothing changes them in place


@contextmanager
def init_ranks(config: TrainingConfig | None, device: torch.device) -> Iterator[Ranks]:
    """The ranks that torchrun started, by its environment; this process alone where there is none.

    Where nothing is trained, `how` is None and every rank has all. An error that ends one rank inside ends all with
    the same code. Raises `Usage` (2) for settings that several ranks cannot have.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world == "1":
        yield SingleProcess()
        return
    try:
        store, rank, count = next(rendezvous("env://"))
    except ValueError as error:
        raise UsageError(f"WORLD_SIZE is {world}: {error}; start the ranks with torchrun") from None
    run = store.add(f"joined-{rank}", 1)  # a process may join for one run after another
    talk = RankChannel(PrefixStore(f"laconic-{run}", store), rank, count)
    with talk.same_error_everywhere():
        if config:
            check_config(config, count)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=PrefixStore(f"torch-{run}", store), rank=rank, world_size=count, timeout=COLLECTIVE_TIMEOUT
        )
        yield DistributedRanks(talk, config is not None and config.parallel == "fsdp", device)
    dist.destroy_process_group()


def check_config(config: TrainingConfig, world_size: int) -> None:
    """Raises `Usage` (2) for settings that so many ranks cannot have."""
    if config.batch_size < world_size:
        raise UsageError(
            f"batch {config.batch_size}: fewer rows than the {world_size} ranks; take a larger batch or fewer ranks"
        )
    if config.stateful:
        raise UsageError(
            f"carry: the state goes from step to step in one process, there are {world_size} ranks; start one"
        )
    if config.parallel == "fsdp" and config.precision == "float16":
        raise UsageError('precision "float16" with parallel "fsdp": the scaler sees one shard; take "bfloat16"')


class DistributedRanks:
    """The ranks of a run under torchrun, `sharded` or replicated."""

    def __init__(self, channel: RankChannel, is_sharded: bool, device: torch.device) -> None:
        self.channel, self.is_sharded, self.device = channel, is_sharded, device
        self.rank, self.world_size = channel.rank, channel.world_size

    def wrap(self, method: nn.Module) -> nn.Module:
        """DDP around a method; FSDP2 inside it, where the method itself is the root."""
        if not any(p.requires_grad for p in method.parameters()):
            return method  # the optimizer says what is wrong
        if self.is_sharded:
            return apply_fsdp(method)
        places = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            DDPForward(method), places, find_unused_parameters=True, gradient_as_bucket_view=True
        )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """DDP divides the sum of gradients by the ranks; the shards' is left a sum."""
        return loss if self.is_sharded else loss * self.world_size

    @contextmanager
    def accumulate_gradients(self, module: nn.Module, is_last: bool) -> Iterator[None]:
        """DDP exchanges gradients once an update; shards are reduced in every micro-batch, and let go after it."""
        waits = module.no_sync() if isinstance(module, DistributedDataParallel) and not is_last else nullcontext()
        with warnings.catch_warnings(), waits:
            warnings.filterwarnings("ignore", message=FSDP_VIEW_WARNING)
            yield
        if self.is_sharded:
            reshard_all(module)
            if is_last:
                self.drop_unused_gradients(module)

    def drop_unused_gradients(self, root: nn.Module) -> None:
        """No gradient where no rank has one, as in one process: what is not used neither moves nor decays."""
        inside = {id(p) for part in fsdp_modules(root)[1:] for p in cast(nn.Module, part).parameters()}
        given = [p for p in root.parameters() if p.grad is not None and id(p) not in inside]
        used = torch.tensor([float(cast(Any, p.grad).to_local().any()) for p in given])
        for p, ranks in zip(given, self.all_reduce_sum(used).tolist(), strict=True):
            if not ranks:
                p.grad = None

    @contextmanager
    def gather_parameters(self, module: nn.Module) -> Iterator[None]:
        """Shards are gathered on every rank, once, so that ranks may answer at their own pace."""
        gathered = fsdp_modules(module) if self.is_sharded else []
        for part in gathered:
            part.unshard()
        try:
            yield
        finally:
            for part in gathered:
                part.reshard()

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Summed over ranks, as a new tensor."""
        summed = numbers.detach().clone()
        dist.all_reduce(summed)
        return summed

    def any_rank(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.all_reduce_sum(torch.tensor(float(flag))).item())

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """The global norm, the same on all ranks."""
        return self.full_tensor(torch.nn.utils.get_total_norm(gradients))

    def full_tensor(self, tensor: Tensor) -> Tensor:
        """What a tensor in shards is in all; every rank asks for it."""
        return cast(Any, tensor).full_tensor() if self.is_sharded else tensor

    def all_gather(self, value: JsonT) -> list[JsonT]:
        """What every rank says, by rank."""
        return self.channel.all_gather(value)

    def run_on_rank_zero(self, function: Callable[[], JsonT]) -> JsonT:
        """What `function` gives on rank 0, or its error, on all."""
        return self.channel.run_on_rank_zero(function)

    @contextmanager
    def lock_run(self, run: RunDirectory) -> Iterator[None]:
        """Rank 0 holds the lock for all; the others go on when it does."""
        with run.lock() if self.rank == 0 else nullcontext():
            self.all_gather(None)
            yield

    def commit_step(
        self,
        run: RunDirectory,
        step: int,
        write: Callable[[ManifestWriter], None],
        fingerprints: Mapping[str, str],
        expected_bytes: int,
    ) -> Path:
        """Rank 0 names the folder, all write into it and say how they fared; rank 0 seals it if all are well."""
        error, named = None, False

        def together(files: ManifestWriter) -> None:
            nonlocal named
            named = True
            self.all_gather(str(files.folder))
            self.write_and_merge(files, write)

        try:
            if self.rank == 0:
                run.commit_step(step, together, fingerprints, expected_bytes)
            elif folder := self.all_gather("")[0]:
                self.write_and_merge(ManifestWriter(Path(folder)), write)
        except LaconicError as raised:
            error = raised
        if self.rank == 0 and not named:
            self.all_gather("")  # there is no folder; why, comes next
        self.channel.raise_first_error(error)
        return run.step_path(step)

    def write_and_merge(self, writer: ManifestWriter, write: Callable[[ManifestWriter], None]) -> None:
        """Writes this rank's files and enters those of all. Raises, on all ranks, what any of them failed with."""
        error: LaconicError | None = None
        try:
            with translate_os_errors(writer.folder):
                write(writer)
        except LaconicError as raised:
            error = raised
        self.channel.raise_first_error(error)
        for entered in self.all_gather({name: (file.bytes, file.sha256) for name, file in writer.entries.items()}):
            writer.entries |= {name: FileEntry(int(size), str(sha256)) for name, (size, sha256) in entered.items()}


class DDPForward(nn.Module):
    """A method as DDP calls it; of the state, gradients end here."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method = method
        self.unused_parameter = nn.Parameter(
            torch.zeros(())
        )  # never used; else DDP warns that it was asked to look for such

    def forward(self, batch: Any, state: Any) -> StepOutput:
        step: StepOutput = self.method(batch, state)
        return step._replace(state=None if step.state is None else step.state.detach())


def apply_fsdp(method: nn.Module) -> nn.Module:
    """FSDP2 in every block and around the rest; gradients are summed, parameters let go by `release` alone."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method  # as slow to import as all of torch

    for module in list(method.modules()):
        if isinstance(module, Decoder):
            for block in module.layers:
                fully_shard(block, reshard_after_forward=False)
    root = fully_shard(method)
    for part in fsdp_modules(method):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # else a factor asks for an operation that gloo has not
        part.set_reshard_after_backward(False, recurse=False)
    root.set_reduce_scatter_unused_params(True, recurse=False)  # some ranks' rows may use what others' do not
    if hasattr(method, "answer"):
        register_fsdp_forward_method(method, "answer")
    return method


def fsdp_modules(module: nn.Module) -> "list[FSDPModule]":
    """The modules that FSDP2 holds in shards of their own, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def reshard_all(module: nn.Module) -> None:
    """Lets go of all that was gathered."""
    for part in fsdp_modules(module):
        part.reshard()
