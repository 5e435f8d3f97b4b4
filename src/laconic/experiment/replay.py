"""The update that failed, once more: from a step before it, by the recipe of its run."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from laconic.config.load import load_recipe
from laconic.errors import InputError
from laconic.experiment.build import build_experiment
from laconic.experiment.load_run import RECIPE_FILE, is_run_dir
from laconic.experiment.optimizers import optimizer
from laconic.storage.run_dir import RunDirectory
from laconic.storage.strict_json import read_json
from laconic.training import loop

INCIDENT_FILE = "incident.json"


class ReplayResult(NamedTuple):
    """The incident as it was kept, and the one that is found now."""

    recorded: dict[str, Any]
    repeated: dict[str, Any]


def replay_update(folder: Path, device: torch.device) -> ReplayResult:
    """Repeats the one update of an incident; nothing is written. Raises `BadInput` (66) where there is none."""
    run = folder.resolve().parent.parent
    if not (folder / INCIDENT_FILE).is_file() or not is_run_dir(run):
        raise InputError(f"{folder} is no incident of a run; give RUN/incidents/step-N")
    then = read_json(folder / INCIDENT_FILE)
    recipe, _ = load_recipe(run / RECIPE_FILE)
    built = build_experiment(recipe, device)
    now = loop.replay(
        built.method,
        built.training_data,
        recipe.train,
        run=RunDirectory(run),
        step=int(then["step"]),
        seed=recipe.seed,
        model_io=built.checkpoint,
        fingerprints=built.fingerprints,
        device=device,
        build_optimizer=optimizer,
    )
    return ReplayResult(then, now)
