"""Repeat the update that an incident recorded, from the step before it."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from laconic.config.load import load_recipe
from laconic.errors import InputError
from laconic.experiment.build import build_experiment
from laconic.experiment.custom_method import check_code_allowed
from laconic.experiment.load_run import RECIPE_FILE, is_run_dir
from laconic.storage.run_dir import RunDirectory
from laconic.storage.strict_json import read_json
from laconic.training.loop import replay

INCIDENT_FILE = "incident.json"


class ReplayResult(NamedTuple):
    """The recorded incident and the repeated one."""

    recorded: dict[str, Any]
    repeated: dict[str, Any]


def replay_update(folder: Path, device: torch.device) -> ReplayResult:
    """Repeat the update of RUN/incidents/step-N without writing anything.

    Raises:
        InputError: If the folder is not an incident of a run.
    """
    run = folder.resolve().parent.parent
    if not (folder / INCIDENT_FILE).is_file() or not is_run_dir(run):
        raise InputError(f"{folder} is not an incident of a run; give RUN/incidents/step-N")
    recorded = read_json(folder / INCIDENT_FILE)
    recipe, _ = load_recipe(run / RECIPE_FILE)
    check_code_allowed(recipe, run, False)
    setup = build_experiment(recipe, device).build_training_setup(device)
    repeated = replay(setup, RunDirectory(run), int(recorded["step"]))
    return ReplayResult(recorded, repeated)
