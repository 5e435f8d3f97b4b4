"""The update that failed, once more: from the step before it, with the rows and random numbers of its incident."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic.core.errors import BadInput
from laconic.core.runs import RunFolder
from laconic.core.strict import read_json
from laconic.recipe.build import build
from laconic.recipe.opened import RECIPE, is_run
from laconic.recipe.read import read
from laconic.training import checkpoint
from laconic.training.ranks import Alone
from laconic.training.step import Place, Updating

INCIDENT, RANDOM = "incident.json", "rng.safetensors"


@dataclass(frozen=True)
class Replayed:
    """What was found then, and what is found now."""

    step: int
    then: dict[str, Any]
    now: dict[str, float]
    outcome: str


def replay(folder: Path, device: torch.device) -> Replayed:
    """Repeats the one update of an incident; nothing is written. Raises `BadInput` (66) where there is none."""
    run = folder.resolve().parent.parent
    if not (folder / INCIDENT).is_file() or not is_run(run):
        raise BadInput(f"{folder} is no incident of a run; give RUN/incidents/step-N")
    about = read_json(folder / INCIDENT)
    recipe, _ = read(run / RECIPE)
    built = build(recipe, device)
    updating = Updating(built.method.train(), recipe.train, recipe.train.length(len(built.source)), Alone(), device)
    step = int(about["step"]) - 1
    if step:
        before = RunFolder(run).asked(step)
        built.model.load(before.folder)
        progress, updating.states = checkpoint.load(before.folder, updating.optimizer, updating.scaler)
        updating.micro, updating.restart = progress.micro, progress.restart
    checkpoint.set_random_state(checkpoint.opened(folder / RANDOM))
    did = updating.update(built.source, Place(step, int(about["epoch"]), tuple(about["rows"])))
    return Replayed(step + 1, about["numbers"], dict(did.numbers), did.outcome)
