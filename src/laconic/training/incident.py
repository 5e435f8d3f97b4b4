"""What is kept of an update with a number that is not finite: its rows, random numbers, and where it began."""

import math
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from laconic.core import artifact
from laconic.core.contract import Batch, Locating, Source
from laconic.core.manifest import Files
from laconic.core.runs import RunFolder
from laconic.training import checkpoint
from laconic.training.step import Did, Place, Updating

UNFILLED = ("aten::empty", "aten::new_empty")  # memory as it was found


class Watch(TorchDispatchMode):
    """Remembers the first operation that gives NaN or +infinity, and the modules it ran in; -infinity is a mask's."""

    def __init__(self, modules: ModuleTracker) -> None:
        super().__init__()
        self.modules, self.first = modules, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self.first and not func.name().startswith(UNFILLED) and any(map(odd, tree_leaves(found))):
            inside = max(self.modules.parents - {"Global"}, key=len, default="")
            way = " in backward" if self.modules.is_bw else ""
            self.first = f"{inside}: {func.name()}{way}" if inside else f"{func.name()}{way}"
        return found


def odd(value: Any) -> bool:
    """Whether a tensor holds NaN or +infinity."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return False
    return bool((value.isnan() | (value == math.inf)).any())


def explain(updating: Updating, source: Source, at: Place, did: Did, before: checkpoint.Tensors) -> dict[str, Any]:
    """The update in words and numbers; it is run once more, from the random numbers `before`, to see where it began."""
    largest = {
        n: updating.ranks.whole(p.detach().abs().max()).item()
        for n, p in updating.method.named_parameters()
        if p.numel()
    }
    spoilt = [name for name, value in largest.items() if not math.isfinite(value)]
    batches, _ = updating.batches(source, at)
    checkpoint.set_random_state(before)
    with ModuleTracker() as modules, Watch(modules) as watch:
        updating.descend(batches)
    updating.optimizer.zero_grad()
    where = f"parameter {spoilt[0]}" if spoilt else located(updating, batches)
    return {
        "step": at.step + 1,
        "epoch": at.epoch,
        "rows": list(at.rows),
        "ids": [identity for batch in batches for identity in batch.ids],
        "rank": updating.ranks.rank,
        "micro": updating.micro,
        "outcome": did.outcome,
        "numbers": {name: value if math.isfinite(value) else None for name, value in did.numbers.items()},
        "first": where or watch.first,
        "operation": watch.first,
        "largest": {name: value if math.isfinite(value) else None for name, value in largest.items()},
    }


def located(updating: Updating, batches: list[Batch]) -> str:
    """What the method says of where it began."""
    method = updating.method
    if not isinstance(method, Locating):
        return ""
    for batch, state in zip(batches, updating.carried(len(batches)), strict=True):
        with updating.computing():
            if where := method.located(batch.to(updating.device), state):
                return where
    return ""


def dump(
    updating: Updating, source: Source, at: Place, did: Did, before: checkpoint.Tensors, run: RunFolder | None
) -> str:
    """Writes incidents/step-N and says where it began; an incident that is there already stays."""
    about = explain(updating, source, at, did, before)
    began = f", first in {about['first']}" if about["first"] else ""
    if run is None:
        return began
    rank = updating.ranks.rank
    folder = run.path / "incidents" / (f"step-{at.step + 1:06d}" + (f"-rank-{rank}" if rank else ""))

    def write(new: Any) -> None:
        files = Files(new)
        files.json("incident.json", about)
        files.tensors("rng.safetensors", before)

    if not folder.exists():
        artifact.commit_folder(folder, write)
    return f"{began}; see {folder}"
