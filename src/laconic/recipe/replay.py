"""The update that failed, once more: from a step before it, by the recipe of its run."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from laconic.core.errors import BadInput
from laconic.core.runs import RunFolder
from laconic.core.strict import read_json
from laconic.recipe.build import build
from laconic.recipe.opened import RECIPE, is_run
from laconic.recipe.optimizers import optimizer
from laconic.recipe.read import read
from laconic.training import loop

INCIDENT = "incident.json"


class Replayed(NamedTuple):
    """The incident as it was kept, and the one that is found now."""

    then: dict[str, Any]
    now: dict[str, Any]


def replay(folder: Path, device: torch.device) -> Replayed:
    """Repeats the one update of an incident; nothing is written. Raises `BadInput` (66) where there is none."""
    run = folder.resolve().parent.parent
    if not (folder / INCIDENT).is_file() or not is_run(run):
        raise BadInput(f"{folder} is no incident of a run; give RUN/incidents/step-N")
    then = read_json(folder / INCIDENT)
    recipe, _ = read(run / RECIPE)
    built = build(recipe, device)
    now = loop.replay(
        built.method,
        built.source,
        recipe.train,
        run=RunFolder(run),
        step=int(then["step"]),
        seed=recipe.seed,
        model=built.model,
        bound=built.bound,
        device=device,
        optimizer=optimizer,
    )
    return Replayed(then, now)
