"""Prepare a run directory: write the resolved recipe and the environment, and check that the run may be resumed."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from laconic.config.load import load_recipe, to_toml
from laconic.config.recipe import Recipe
from laconic.config.recipe_keys import explicit_values, flatten
from laconic.errors import BusyError, CorruptArtifactError, UsageError
from laconic.experiment.load_run import RECIPE_FILE
from laconic.storage import manifest
from laconic.storage.atomic import write_text_atomically
from laconic.storage.run_dir import RunDirectory
from laconic.storage.strict_json import to_canonical_json

ENVIRONMENT_FILE = "env.json"


def init_run(
    run: RunDirectory, recipe: Recipe, resume: object = "auto", environment: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """Write recipe.toml and env.json into a locked run directory, and return notes on how the run goes on.

    `laconic.load` needs the recipe, so call this before `training.loop.train`. If steps without a recipe exist already,
    they become loadable with the recipe that they were trained with.

    `resume` is "auto", "never", or the step of a checkpoint; `environment` has versions and machine.

    Raises:
        UsageError: If existing steps were trained with another recipe; the message lists the keys. If there is no step
            to resume from.
        BusyError: If there are steps and `resume` is "never", or the directory holds a recipe of the user's own.
    """
    notes = check_resume(run, recipe, resume)
    write_text_atomically(run.path / ENVIRONMENT_FILE, to_canonical_json(dict(environment)) + "\n")
    write_text_atomically(run.path / RECIPE_FILE, to_toml(recipe))  # last, as `check_resume` takes it for laconic's own
    return notes


def check_resume(run: RunDirectory, recipe: Recipe, resume: object = "auto") -> list[str]:
    """Return the notes of `init_run`, and raise its errors, without writing anything."""
    path = run.path / RECIPE_FILE
    steps = run.step_numbers()
    if steps and resume == "never":
        raise BusyError(f"{run.path} already has checkpoints; resume the run or choose another folder")
    if isinstance(resume, int) and resume not in steps:
        run.get_step(resume)  # raises
    if not path.exists():
        return []
    if not steps and not (run.path / ENVIRONMENT_FILE).exists():  # laconic writes both
        raise BusyError(f"{path} would be replaced by the complete recipe of the run; choose another --out")
    return check_same_recipe(path, recipe) if steps else []


def check_same_recipe(path: Path, recipe: Recipe) -> list[str]:
    """Return a note if the run becomes longer and its learning rates differ from those of a run of that length."""
    before, _ = load_recipe(path)
    theirs, ours = explicit_values(before), explicit_values(recipe)
    old_values, new_values = (flatten(x.model_dump(mode="json", exclude_none=True)) for x in (before, recipe))
    lines = [
        f"{key}: {format_value(old_values, key)} in the run, {format_value(new_values, key)} requested"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    ]
    notes: list[str] = []
    for key in ("steps", "epochs"):
        old, new = getattr(before.train, key), getattr(recipe.train, key)
        if old is not None and new is not None and new < old:
            lines.append(f"train.{key}: {old} in the run, {new} requested; a run can only be made longer")
        elif old is not None and new is not None and new > old and recipe.train.lr_schedule != "constant":
            notes.append(
                f"train.{key}: {old} in the run, {new} requested; the {recipe.train.lr_schedule} schedule of the "
                f"learning rate now ends at {new}, so the run differs from one that is {new} {key} long from the start"
            )
    if lines:
        raise UsageError(
            f"{path.parent} was trained with another recipe; choose another --out or change the keys back\n"
            + "\n".join(lines)
        )
    return notes


def check_same_rows(run: RunDirectory, recipe: Recipe, fingerprint: str) -> None:
    """Raise `CorruptArtifactError` with the names of the files if the run was trained on other rows."""
    for step in reversed(run.step_numbers()):
        with suppress(CorruptArtifactError):  # a damaged step is not resumed
            before = manifest.read_manifest(run.step_path(step)).fingerprints.get("data")
            break
    else:
        return
    if before != fingerprint:
        names = recipe.data.name or ((recipe.data.path,) if recipe.data.path else ("the generated data",))
        raise CorruptArtifactError(
            f"{run.path} was trained on other rows than {' and '.join(names)} has now; restore the old rows, or train "
            "from the beginning with another --out"
        )


def format_value(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "unset"
