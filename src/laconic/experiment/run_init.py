"""A run directory before its first update: the resolved recipe, the environment, and whether it may be continued."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.config.load import load_recipe, to_toml
from laconic.config.recipe import Recipe, explicit_values
from laconic.errors import BusyError, UsageError
from laconic.experiment.load_run import RECIPE_FILE
from laconic.storage import atomic
from laconic.storage.run_dir import RunDirectory
from laconic.storage.strict_json import to_canonical_json

ENVIRONMENT_FILE = "env.json"


def init_run(run: RunDirectory, recipe: Recipe, resume: object, environment: Mapping[str, Any]) -> None:
    """Writes recipe.toml and env.json into a run that is held.

    Raises `Usage` (2) where the steps there were trained by another recipe, with every key that differs; `Busy` (73)
    for `resume` "never" where there are steps.
    """
    path = run.path / RECIPE_FILE
    if run.step_numbers():
        if resume == "never":
            raise BusyError(f"{run.path} has {len(run.step_numbers())} steps; resume, or choose another folder")
        check_same_recipe(path, recipe)
    elif isinstance(resume, int):
        run.get_step(resume)  # says that there is none
    write_text(path, to_toml(recipe))
    write_text(run.path / ENVIRONMENT_FILE, to_canonical_json(environment) + "\n")


def check_same_recipe(path: Path, recipe: Recipe) -> None:
    """Raises `Usage` with every key whose other value would make another run."""
    before, _ = load_recipe(path)
    there, ours = explicit_values(before), explicit_values(recipe)
    lines = [
        f"{key}: {get_json_value(before, key)} there, {get_json_value(recipe, key)} asked"
        for key in sorted(there.keys() | ours.keys())
        if there.get(key) != ours.get(key)
    ]
    for key in ("steps", "epochs"):
        had, asked = getattr(before.train, key), getattr(recipe.train, key)
        if had is not None and asked is not None and asked < had:
            lines.append(f"train.{key}: {had} there, {asked} asked; a run is made longer, not shorter")
    if lines:
        raise UsageError(
            f"{path.parent} was begun by another recipe; choose another --out, or change back\n" + "\n".join(lines)
        )


def get_json_value(recipe: Recipe, key: str) -> str:
    """What a recipe says of a dotted key, as JSON."""
    found: Any = recipe.model_dump(mode="json")
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return "absent" if found is None else json.dumps(found, ensure_ascii=False)


def write_text(path: Path, text: str) -> None:
    """A file, whole or not at all."""
    atomic.write_file_atomically(path, lambda new: new.write_text(text, encoding="utf-8"))
