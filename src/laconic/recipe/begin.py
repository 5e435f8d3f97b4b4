"""A run directory before its first update: the resolved recipe, the environment, and whether it may be continued."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.core import artifact
from laconic.core.errors import Busy, Usage
from laconic.core.runs import RunFolder
from laconic.core.strict import canonical
from laconic.recipe.opened import RECIPE
from laconic.recipe.read import read, written
from laconic.recipe.schema import Recipe, said

ENVIRONMENT = "env.json"


def begin(run: RunFolder, recipe: Recipe, resume: object, environment: Mapping[str, Any]) -> None:
    """Writes recipe.toml and env.json into a run that is held.

    Raises `Usage` (2) where the steps there were trained by another recipe, with every key that differs; `Busy` (73)
    for `resume` "never" where there are steps.
    """
    path = run.path / RECIPE
    if run.numbers():
        if resume == "never":
            raise Busy(f"{run.path} has {len(run.numbers())} steps; resume, or choose another folder")
        check_same(path, recipe)
    elif isinstance(resume, int):
        run.asked(resume)  # says that there is none
    put(path, written(recipe))
    put(run.path / ENVIRONMENT, canonical(environment) + "\n")


def check_same(path: Path, recipe: Recipe) -> None:
    """Raises `Usage` with every key whose other value would make another run."""
    before, _ = read(path)
    there, ours = said(before), said(recipe)
    lines = [
        f"{key}: {value(before, key)} there, {value(recipe, key)} asked"
        for key in sorted(there.keys() | ours.keys())
        if there.get(key) != ours.get(key)
    ]
    for key in ("steps", "epochs"):
        had, asked = getattr(before.train, key), getattr(recipe.train, key)
        if had is not None and asked is not None and asked < had:
            lines.append(f"train.{key}: {had} there, {asked} asked; a run is made longer, not shorter")
    if lines:
        raise Usage(
            f"{path.parent} was begun by another recipe; choose another --out, or change back\n" + "\n".join(lines)
        )


def value(recipe: Recipe, key: str) -> str:
    """What a recipe says of a dotted key, as JSON."""
    found: Any = recipe.model_dump(mode="json")
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return "absent" if found is None else json.dumps(found, ensure_ascii=False)


def put(path: Path, text: str) -> None:
    """A file, whole or not at all."""
    artifact.replace_file(path, lambda new: new.write_text(text, encoding="utf-8"))
