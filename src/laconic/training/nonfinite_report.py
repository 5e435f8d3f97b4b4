"""What is kept of an update with a number that is not finite: its rows, random numbers, and where it began."""

import math
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from laconic.interfaces import Batch, LocatesNonFinite, TrainingData
from laconic.storage import atomic
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training import checkpoint
from laconic.training.step import UpdateIndex, Updater, UpdateResult

UNINITIALIZED_OPS = ("aten::empty", "aten::new_empty")  # memory as it was found


class FirstNonFiniteOp(TorchDispatchMode):
    """Remembers the first operation that gives NaN or +infinity, and the modules it ran in; -infinity is a mask's."""

    def __init__(self, modules: ModuleTracker) -> None:
        super().__init__()
        self.modules, self.first = modules, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if (
            not self.first
            and not func.name().startswith(UNINITIALIZED_OPS)
            and any(map(has_nonfinite, tree_leaves(found)))
        ):
            inside = max(self.modules.parents - {"Global"}, key=len, default="")
            way = " in backward" if self.modules.is_bw else ""
            self.first = f"{inside}: {func.name()}{way}" if inside else f"{func.name()}{way}"
        return found


def has_nonfinite(value: Any) -> bool:
    """Whether a tensor holds NaN or +infinity."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return bool((value.isnan() | (value == math.inf)).any())


def build_report(
    updater: Updater, data: TrainingData, index: UpdateIndex, result: UpdateResult, random_state: checkpoint.Tensors
) -> dict[str, Any]:
    """The update in words and numbers; it is run once more, from the random numbers `before`, to see where it began."""
    largest = {
        n: updater.ranks.full_tensor(p.detach().abs().max()).item()
        for n, p in updater.method.named_parameters()
        if p.numel()
    }
    spoilt = [name for name, value in largest.items() if not math.isfinite(value)]
    batches, _ = updater.make_micro_batches(data, index)
    checkpoint.set_random_state(random_state)
    with ModuleTracker() as modules, FirstNonFiniteOp(modules) as watch:
        updater.backward_micro_batches(batches)
    updater.optimizer.zero_grad()
    where = f"parameter {spoilt[0]}" if spoilt else locate_with_method(updater, batches)
    return {
        "step": index.step + 1,
        "epoch": index.epoch,
        "rows": list(index.rows),
        "ids": [identity for batch in batches for identity in batch.ids],
        "rank": updater.ranks.rank,
        "micro": updater.micro_batch_size,
        "outcome": result.status,
        "numbers": {name: value if math.isfinite(value) else None for name, value in result.metrics.items()},
        "first": where or watch.first,
        "operation": watch.first,
        "largest": {name: value if math.isfinite(value) else None for name, value in largest.items()},
    }


def locate_with_method(updater: Updater, batches: list[Batch]) -> str:
    """What the method says of where it began."""
    method = updater.method
    if not isinstance(method, LocatesNonFinite):
        return ""
    for batch, state in zip(batches, updater.incoming_states(len(batches)), strict=True):
        with updater.autocast():
            if where := method.locate_nonfinite(batch.to(updater.device), state):
                return where
    return ""


def write_report(
    updater: Updater,
    data: TrainingData,
    index: UpdateIndex,
    result: UpdateResult,
    random_state: checkpoint.Tensors,
    run: RunDirectory | None,
) -> str:
    """Writes incidents/step-N and says where it began; an incident that is there already stays."""
    about = build_report(updater, data, index, result, random_state)
    began = f", first in {about['first']}" if about["first"] else ""
    if run is None:
        return began
    rank = updater.ranks.rank
    folder = run.path / "incidents" / (f"step-{index.step + 1:06d}" + (f"-rank-{rank}" if rank else ""))

    def write(new: Any) -> None:
        files = ManifestWriter(new)
        files.add_json("incident.json", about)
        files.add_tensors("rng.safetensors", random_state)

    if not folder.exists():
        atomic.write_folder_atomically(folder, write)
    return f"{began}; see {folder}"
