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

from laconic.core.contract import Step
from laconic.core.decoder import Decoder
from laconic.core.errors import LaconicError, Usage, on_disk
from laconic.core.manifest import File, Files
from laconic.core.runs import RunFolder
from laconic.training.agreement import Talk
from laconic.training.ranks import Alone, Ranks
from laconic.training.settings import Training

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Said = TypeVar("Said")
PATIENCE = timedelta(minutes=30)  # of a collective; a rank may validate or save for long
VIEWS = "FSDP2-wrapped module"  # keys and values are views of one product; nothing changes them in place


@contextmanager
def joined(how: Training | None, device: torch.device) -> Iterator[Ranks]:
    """The ranks that torchrun started, by its environment; this process alone where there is none.

    Where nothing is trained, `how` is None and every rank has all. An error that ends one rank inside ends all with
    the same code. Raises `Usage` (2) for settings that several ranks cannot have.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    if world == "1":
        yield Alone()
        return
    try:
        store, rank, count = next(rendezvous("env://"))
    except ValueError as error:
        raise Usage(f"WORLD_SIZE is {world}: {error}; start the ranks with torchrun") from None
    run = store.add(f"joined-{rank}", 1)  # a process may join for one run after another
    talk = Talk(PrefixStore(f"laconic-{run}", store), rank, count)
    with talk.alike():
        if how:
            check(how, count)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=PrefixStore(f"torch-{run}", store), rank=rank, world_size=count, timeout=PATIENCE
        )
        yield Several(talk, how is not None and how.parallel == "fsdp", device)
    dist.destroy_process_group()


def check(how: Training, world: int) -> None:
    """Raises `Usage` (2) for settings that so many ranks cannot have."""
    if how.batch < world:
        raise Usage(f"batch {how.batch}: fewer rows than the {world} ranks; take a larger batch or fewer ranks")
    if how.carry:
        raise Usage(f"carry: the state goes from step to step in one process, there are {world} ranks; start one")
    if how.parallel == "fsdp" and how.precision == "float16":
        raise Usage('precision "float16" with parallel "fsdp": the scaler sees one shard; take "bfloat16"')


class Several:
    """The ranks of a run under torchrun, `sharded` or replicated."""

    def __init__(self, talk: Talk, sharded: bool, device: torch.device) -> None:
        self.talk, self.sharded, self.device = talk, sharded, device
        self.rank, self.world = talk.rank, talk.world

    def wrap(self, method: nn.Module) -> nn.Module:
        """DDP around a method; FSDP2 inside it, where the method itself is the root."""
        if not any(p.requires_grad for p in method.parameters()):
            return method  # the optimizer says what is wrong
        if self.sharded:
            return shard(method)
        places = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            Forward(method), places, find_unused_parameters=True, gradient_as_bucket_view=True
        )

    def scaled(self, loss: Tensor) -> Tensor:
        """DDP divides the sum of gradients by the ranks; the shards' is left a sum."""
        return loss if self.sharded else loss * self.world

    @contextmanager
    def accumulating(self, module: nn.Module, last: bool) -> Iterator[None]:
        """DDP exchanges gradients once an update; shards are reduced in every micro-batch, and let go after it."""
        waits = module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()
        with warnings.catch_warnings(), waits:
            warnings.filterwarnings("ignore", message=VIEWS)
            yield
        if self.sharded:
            release(module)
            if last:
                self.drop_unused(module)

    def drop_unused(self, root: nn.Module) -> None:
        """No gradient where no rank has one, as in one process: what is not used neither moves nor decays."""
        inside = {id(p) for part in parts(root)[1:] for p in cast(nn.Module, part).parameters()}
        given = [p for p in root.parameters() if p.grad is not None and id(p) not in inside]
        used = torch.tensor([float(cast(Any, p.grad).to_local().any()) for p in given])
        for p, ranks in zip(given, self.sum(used).tolist(), strict=True):
            if not ranks:
                p.grad = None

    @contextmanager
    def answering(self, module: nn.Module) -> Iterator[None]:
        """Shards are gathered on every rank, once, so that ranks may answer at their own pace."""
        gathered = parts(module) if self.sharded else []
        for part in gathered:
            part.unshard()
        try:
            yield
        finally:
            for part in gathered:
                part.reshard()

    def sum(self, numbers: Tensor) -> Tensor:
        """Summed over ranks, as a new tensor."""
        summed = numbers.detach().clone()
        dist.all_reduce(summed)
        return summed

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.sum(torch.tensor(float(flag))).item())

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The global norm, the same on all ranks."""
        return self.whole(torch.nn.utils.get_total_norm(gradients))

    def whole(self, tensor: Tensor) -> Tensor:
        """What a tensor in shards is in all; every rank asks for it."""
        return cast(Any, tensor).full_tensor() if self.sharded else tensor

    def exchange(self, value: Said) -> list[Said]:
        """What every rank says, by rank."""
        return self.talk.exchange(value)

    def first(self, function: Callable[[], Said]) -> Said:
        """What `function` gives on rank 0, or its error, on all."""
        return self.talk.first(function)

    @contextmanager
    def held(self, run: RunFolder) -> Iterator[None]:
        """Rank 0 holds the lock for all; the others go on when it does."""
        with run.held() if self.rank == 0 else nullcontext():
            self.exchange(None)
            yield

    def commit(
        self, run: RunFolder, number: int, write: Callable[[Files], None], bound: Mapping[str, str], expected: int
    ) -> Path:
        """Rank 0 names the folder, all write into it and say how they fared; rank 0 seals it if all are well."""
        error, named = None, False

        def together(files: Files) -> None:
            nonlocal named
            named = True
            self.exchange(str(files.folder))
            self.written(files, write)

        try:
            if self.rank == 0:
                run.commit(number, together, bound, expected)
            elif folder := self.exchange("")[0]:
                self.written(Files(Path(folder)), write)
        except LaconicError as raised:
            error = raised
        if self.rank == 0 and not named:
            self.exchange("")  # there is no folder; why, comes next
        self.talk.ask_all(error)
        return run.step(number)

    def written(self, files: Files, write: Callable[[Files], None]) -> None:
        """Writes this rank's files and enters those of all. Raises, on all ranks, what any of them failed with."""
        error: LaconicError | None = None
        try:
            with on_disk(files.folder):
                write(files)
        except LaconicError as raised:
            error = raised
        self.talk.ask_all(error)
        for entered in self.exchange({name: (file.bytes, file.sha256) for name, file in files.entered.items()}):
            files.entered |= {name: File(int(size), str(sha256)) for name, (size, sha256) in entered.items()}


class Forward(nn.Module):
    """A method as DDP calls it; of the state, gradients end here."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method = method
        self.spare = nn.Parameter(torch.zeros(()))  # never used; else DDP warns that it was asked to look for such

    def forward(self, batch: Any, state: Any) -> Step:
        step: Step = self.method(batch, state)
        return step._replace(state=None if step.state is None else step.state.detach())


def shard(method: nn.Module) -> nn.Module:
    """FSDP2 in every block and around the rest; gradients are summed, parameters let go by `release` alone."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method  # as slow to import as all of torch

    for module in list(method.modules()):
        if isinstance(module, Decoder):
            for block in module.blocks:
                fully_shard(block, reshard_after_forward=False)
    root = fully_shard(method)
    for part in parts(method):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # else a factor asks for an operation that gloo has not
        part.set_reshard_after_backward(False, recurse=False)
    root.set_reduce_scatter_unused_params(True, recurse=False)  # some ranks' rows may use what others' do not
    if hasattr(method, "answer"):
        register_fsdp_forward_method(method, "answer")
    return method


def parts(module: nn.Module) -> "list[FSDPModule]":
    """The modules that FSDP2 holds in shards of their own, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def release(module: nn.Module) -> None:
    """Lets go of all that was gathered."""
    for part in parts(module):
        part.reshard()
