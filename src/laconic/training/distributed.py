"""Train on several ranks started by torchrun, with DDP or FSDP2; a step is committed by all ranks or by none.

DDP (arXiv:2006.15704): every rank holds the whole model. FSDP2 (arXiv:2304.11277): parameters, gradients and optimizer
state are sharded. A method calls each block several times before one backward pass, so blocks are gathered once per
micro-batch and resharded after all gradients are reduced; with `reshard` they are gathered for every pass.
"""

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from laconic import errors
from laconic.config.training import TrainingConfig
from laconic.errors import LaconicError, UsageError, translate_os_errors
from laconic.interfaces import StepOutput
from laconic.models.decoder import Decoder
from laconic.storage.manifest import FileEntry, ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training.ranks import JsonT, Ranks, WriteFn
from laconic.training.sharded import full_tensor

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # one rank may validate or save for long
ENDED_GROUPS = list[object]()  # process groups, kept until the process ends
ERROR_TIMEOUT = timedelta(seconds=3)  # for the error of a peer that ended in the middle of a collective
EXIT_GRACE_SECONDS = 1.0
FAILED_KEY, EXITING_KEY = "failed", "exiting"
ERROR_CLASSES = {
    kind.exit_code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LaconicError)
}
FSDP_VIEW_WARNING = "FSDP2-wrapped module"  # keys and values are views of one product; nothing changes them in place


@contextmanager
def init_ranks(config: TrainingConfig | None, device: torch.device) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or yield this process alone; UsageError if options allow only one.

    An error on one rank inside this context ends all ranks with the same exit code. `config` is None without training,
    when every rank holds the whole model.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size == "1":
        yield Ranks()
        return
    try:
        store, rank, count = next(rendezvous("env://"))
    except ValueError as error:
        raise UsageError(f"WORLD_SIZE is {world_size}: {error}; start the ranks with torchrun") from None
    session = store.add(f"joined-{rank}", 1)  # a process may join several times
    ranks = DistributedRanks(PrefixStore(f"laconic-{session}", store), rank, count, config, device)
    with ranks.same_error_everywhere():
        if config:
            check_distributed_config(config, count)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL and FSDP2 use the current device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch_store = PrefixStore(f"torch-{session}", store)
        dist.init_process_group(backend, store=torch_store, rank=rank, world_size=count, timeout=COLLECTIVE_TIMEOUT)
        yield ranks
    # The destructor of a gloo group holds the GIL and waits for a thread that may still need it to drop a tensor.
    ENDED_GROUPS.append(dist.group.WORLD)
    dist.destroy_process_group()


def check_distributed_config(config: TrainingConfig, world_size: int) -> None:
    if config.batch_size < world_size:
        raise UsageError(f"batch_size = {config.batch_size} is less than the {world_size} ranks; raise it")
    if config.stateful and config.batch_size % world_size:
        raise UsageError(
            f"batch_size = {config.batch_size} is not a multiple of the {world_size} ranks; with stateful = true "
            "every rank carries the states of its own rows"
        )
    if config.parallel == "fsdp" and config.precision == "float16":
        raise UsageError('parallel = "fsdp" does not support precision = "float16"; use "bfloat16"')


class DistributedRanks(Ranks):
    """Several ranks under torchrun.

    Errors go through its store, which still answers when a collective is broken because a peer has ended.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, config: TrainingConfig | None, device: torch.device
    ) -> None:
        self.store, self.rank, self.world_size, self.device = store, rank, world_size, device
        self.is_sharded = config is not None and config.parallel == "fsdp"
        self.reshard = config is not None and config.reshard

    def all_gather(self, value: JsonT) -> list[JsonT]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def run_on_rank_zero(self, function: Callable[[], JsonT]) -> JsonT:
        result: Any = None
        with self.agreed_error():
            result = function() if self.rank == 0 else None
        return self.all_gather(result)[0]

    @contextmanager
    def agreed_error(self) -> Iterator[None]:
        """Raise on all ranks the first error that any of them has in this context; all enter it."""
        error: LaconicError | None = None
        try:
            yield
        except LaconicError as raised:
            error = raised
        first = next((report for report in self.all_gather(error_to_json(error)) if report), None)
        if first:
            raise error if error and first == error_to_json(error) else error_from_json(first)

    @contextmanager
    def same_error_everywhere(self) -> Iterator[None]:
        """End all ranks with the same error, whichever rank raises it inside this context."""
        try:
            yield
        except Exception as error:
            error = self.agree_on_error(error)
            raise error

    def agree_on_error(self, error: Exception) -> Exception:
        """Publish this rank's error and return it, or return that of the peer that caused it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it once the first rank has ended
        with suppress(dist.DistError):
            bug = {"code": LaconicError.exit_code, "message": f"rank {self.rank}: {type(error).__name__}: {error}"}
            report = error_to_json(error) if isinstance(error, LaconicError) else bug
            if isinstance(error, RuntimeError):  # raised by a collective if a peer has ended
                with suppress(dist.DistStoreError):
                    self.store.wait([FAILED_KEY], ERROR_TIMEOUT)
                    error = error_from_json(json.loads(self.store.get(FAILED_KEY)))
            self.store.compare_set(FAILED_KEY, "", json.dumps(report))
            self.wait_for_peers()
        return error

    def wait_for_peers(self) -> None:
        """Wait a little until every rank is about to end; torchrun stops the others as soon as one has."""
        deadline = time.monotonic() + EXIT_GRACE_SECONDS
        self.store.add(EXITING_KEY, 1)
        while self.store.add(EXITING_KEY, 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.02)

    def wrap(self, method: nn.Module) -> nn.Module:
        if not any(p.requires_grad for p in method.parameters()):
            return method  # building the optimizer raises the error
        if self.is_sharded:
            return apply_fsdp(method, self.device, self.reshard)
        device_ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            DDPForward(method), device_ids, find_unused_parameters=True, gradient_as_bucket_view=True
        )

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Undo DDP's division of gradients by the number of ranks; FSDP is set to sum them."""
        return loss if self.is_sharded else loss * self.world_size

    @contextmanager
    def accumulate_gradients(self, module: nn.Module, is_last: bool) -> Iterator[None]:
        """Reduce gradients once per update with DDP, in every micro-batch with FSDP."""
        is_ddp = isinstance(module, DistributedDataParallel)
        with warnings.catch_warnings(), module.no_sync() if is_ddp and not is_last else nullcontext():
            warnings.filterwarnings("ignore", message=FSDP_VIEW_WARNING)
            yield
        if self.is_sharded:
            for part in fsdp_modules(module):
                part.reshard()
            if is_last:
                self.sum_scalar_gradients(module)
                self.drop_unused_gradients(module)

    def sum_scalar_gradients(self, root: nn.Module) -> None:
        """Sum the gradients of scalars, which FSDP2 does not shard, over ranks."""
        scalars = [p for p in root.parameters() if p.ndim == 0 and p.requires_grad]
        if scalars:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in scalars]
            for p, total in zip(scalars, self.all_reduce_sum(torch.stack(gradients)), strict=True):
                p.grad = total

    def drop_unused_gradients(self, root: nn.Module) -> None:
        """Remove gradients that no rank has, as in one process, so that unused parameters do not decay."""
        nested = {id(p) for part in fsdp_modules(root)[1:] for p in cast(nn.Module, part).parameters()}
        parameters = [p for p in root.parameters() if p.grad is not None and id(p) not in nested]
        is_used = torch.tensor([float(local_shard(cast(Tensor, p.grad)).any()) for p in parameters])
        for p, num_ranks in zip(parameters, self.all_reduce_sum(is_used).tolist(), strict=True):
            if not num_ranks:
                p.grad = None

    @contextmanager
    def gather_parameters(self, module: nn.Module) -> Iterator[None]:
        """Gather all shards once, so that each rank may call the module at its own pace."""
        parts = fsdp_modules(module) if self.is_sharded else []
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(self.reshard and part is not parts[0], recurse=False)
                part.reshard()

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        total = numbers.detach().clone()
        dist.all_reduce(total)
        return total

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the global norm, the same on all ranks."""
        shards = [gradient for gradient in gradients if gradient.ndim]
        scalars = [gradient for gradient in gradients if not gradient.ndim]
        norms = [full_tensor(torch.nn.utils.get_total_norm(part)) for part in (shards, scalars) if part]
        return torch.nn.utils.get_total_norm(norms)

    @contextmanager
    def lock_run(self, run: RunDirectory) -> Iterator[None]:
        """Hold the lock on rank 0; the others wait for it."""
        with run.lock() if self.rank == 0 else nullcontext():
            self.all_gather(None)
            yield

    def commit_step(
        self, run: RunDirectory, step: int, write: WriteFn, fingerprints: Mapping[str, str], expected_bytes: int
    ) -> Path:
        """Let all ranks write into the temporary folder of rank 0, which commits it if none of them failed."""
        is_announced = False

        def write_together(writer: ManifestWriter) -> None:
            nonlocal is_announced
            is_announced = True
            self.all_gather(str(writer.folder))
            self.write_and_merge(writer, write)

        with self.agreed_error():
            if self.rank == 0:
                try:
                    run.commit_step(step, write_together, fingerprints, expected_bytes)
                finally:
                    if not is_announced:
                        self.all_gather("")  # there is no folder; the error follows
            elif folder := self.all_gather("")[0]:
                self.write_and_merge(ManifestWriter(Path(folder)), write)
        return run.step_path(step)

    def write_and_merge(self, writer: ManifestWriter, write: WriteFn) -> None:
        """Write this rank's files and record those of all; raise on all ranks what any of them failed with."""
        with self.agreed_error(), translate_os_errors(writer.folder):
            write(writer)
        for entries in self.all_gather({name: (entry.bytes, entry.sha256) for name, entry in writer.entries.items()}):
            writer.entries |= {name: FileEntry(size, sha256) for name, (size, sha256) in entries.items()}


def error_to_json(error: LaconicError | None) -> dict[str, object] | None:
    return error and {"code": error.exit_code, "message": str(error)}


def error_from_json(report: dict[str, object]) -> LaconicError:
    return ERROR_CLASSES.get(int(str(report["code"])), LaconicError)(str(report["message"]))


class DDPForward(nn.Module):
    """A method as DDP calls it; the returned state is detached."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method = method
        self.unused_parameter = nn.Parameter(torch.zeros(()))  # else DDP warns if it finds no unused parameters

    def forward(self, batch: Any, state: Any) -> StepOutput:
        output: StepOutput = self.method(batch, state)
        return output._replace(state=None if output.state is None else output.state.detach())


def apply_fsdp(method: nn.Module, device: torch.device, reshard: bool) -> nn.Module:
    """Apply FSDP2 to the blocks of each decoder and to the rest; gradients are summed.

    With `reshard` a block's weights are freed after each of its passes, else `accumulate_gradients` does. The rest
    (embeddings, head, latents) is whole during a micro-batch. FSDP2 cannot shard scalars: every rank has them whole.
    """
    from torch.distributed.device_mesh import init_device_mesh  # slow imports
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    scalars = {p for p in method.parameters() if not p.ndim}
    shard = partial(fully_shard, mesh=mesh, ignored_params=scalars)
    decoders = [module for module in method.modules() if isinstance(module, Decoder) and module.calls_blocks]
    for decoder in decoders:
        blocks = [cast(FSDPModule, shard(b, reshard_after_forward=reshard)) for b in decoder.layers]
        # by default FSDP2 follows the order of past passes, which differ between ranks in a validation
        for earlier, block in zip([blocks[0], *blocks], blocks, strict=False):
            block.set_modules_to_backward_prefetch([earlier])
    root = cast(FSDPModule, shard(method, reshard_after_forward=False))
    for part in fsdp_modules(method):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # else a factor needs an operation that gloo does not have
        part.set_reshard_after_backward(reshard and part is not root, recurse=False)
    root.set_reduce_scatter_unused_params(True, recurse=False)  # rows of one rank may use what those of others do not
    if hasattr(method, "answer"):
        register_fsdp_forward_method(method, "answer")
    return method


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or a whole tensor itself."""
    return cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor


def fsdp_modules(module: nn.Module) -> "list[FSDPModule]":
    """Return the modules that FSDP2 shards, the root first."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in module.modules() if isinstance(part, FSDPModule)]
