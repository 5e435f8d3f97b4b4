"""Report on an update with NaN or infinity: its rows and random state, and the operation where it began."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from laconic.interfaces import TrainingData
from laconic.storage import atomic
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training.metrics import replace_nonfinite
from laconic.training.random_state import set_random_state
from laconic.training.row_order import UpdateIndex
from laconic.training.sharded import full_tensor
from laconic.training.step import Updater, UpdateResult

UNINITIALIZED_OPS = ("aten::empty", "aten::new_empty")


class FirstNonFiniteOp(TorchDispatchMode):
    """Records the first operation that returns NaN or +infinity, with its module; masks hold -infinity.

    Autograd's anomaly mode sees only NaN of the backward pass, and raises in the middle of it, which would leave the
    other ranks waiting.
    """

    def __init__(self, modules: ModuleTracker) -> None:
        super().__init__()
        self.modules, self.first = modules, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_initialized = not func.name().startswith(UNINITIALIZED_OPS)
        if not self.first and is_initialized and any(map(has_nonfinite, tree_leaves(result))):
            module = max(self.modules.parents - {"Global"}, key=len, default="")
            phase = " in backward" if self.modules.is_bw else ""
            self.first = f"{module}: {func.name()}{phase}" if module else f"{func.name()}{phase}"
        return result


def has_nonfinite(value: Any) -> bool:
    """Return whether a tensor holds NaN or +infinity."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return bool((value.isnan() | (value == math.inf)).any())


def build_report(
    updater: Updater, data: TrainingData, index: UpdateIndex, result: UpdateResult, random_state: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Repeat an update from the random state before it and return what is known about it, as JSON values."""
    parameters = [(name, p) for name, p in updater.method.named_parameters() if p.numel()]
    largest = {name: full_tensor(p.detach().abs().max()).item() for name, p in parameters}
    bad_parameter = next((name for name, value in largest.items() if not math.isfinite(value)), None)
    batches, _ = updater.make_micro_batches(data, index)
    set_random_state(random_state)
    with ModuleTracker() as modules, FirstNonFiniteOp(modules) as mode:
        updater.backward_micro_batches(batches)
    updater.optimizer.zero_grad()
    first = f"parameter {bad_parameter}" if bad_parameter else mode.first
    return {
        "step": index.step + 1,
        "epoch": index.epoch,
        "rows": list(index.rows),
        "ids": [row_id for batch in batches for row_id in batch.ids],
        "rank": updater.ranks.rank,
        "micro_batch_size": updater.micro_batch_size,
        "status": result.status,
        "metrics": replace_nonfinite(result.metrics),
        "first": first,
        "operation": mode.first,
        "largest": replace_nonfinite(largest),
    }


def write_report(
    report: Mapping[str, Any], random_state: Mapping[str, Tensor], run: RunDirectory | None, rank: int
) -> str:
    """Write incidents/step-N, unless it exists, and return the end of an error message that names the place."""
    place = f", first in {report['first']}" if report["first"] else ""
    if run is None:
        return place
    folder = run.path / "incidents" / (f"step-{report['step']:06d}" + (f"-rank-{rank}" if rank else ""))

    def write(new: Path) -> None:
        writer = ManifestWriter(new)
        writer.add_json("incident.json", report)
        writer.add_tensors("rng.safetensors", random_state)

    if not folder.exists():
        atomic.write_folder_atomically(folder, write)
    return f"{place}; see {folder}"
