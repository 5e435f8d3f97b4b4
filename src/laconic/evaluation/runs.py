"""Runs under evaluation: their names, seeds and checkpoints, and an environment as in training."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.errors import InputError, UsageError
from laconic.experiment.load_run import (
    RECIPE_FILE,
    LoadedRun,
    check_not_empty_run,
    is_export,
    is_run_dir,
    latest_step,
    load_run,
)
from laconic.storage.atomic import write_text_atomically
from laconic.storage.cache_dir import cache_dir
from laconic.storage.export_record import EXPORT_FOLDER, read_export_record
from laconic.storage.manifest import hash_json
from laconic.storage.run_dir import RunDirectory
from laconic.storage.strict_json import read_json, to_canonical_json
from laconic.training.validation_log import read_validations

EXPORT_MARKER = "exported-run.json"  # in a results folder


def short_run_names(paths: Sequence[str | Path]) -> list[str]:
    """Return short unique names of runs: the last parts of their paths; `seed-0` alone is not a name."""
    for n in (1, 2, 3):
        names = ["/".join(Path(path).resolve().parts[-n:]) for path in paths]
        if len(set(names)) == len(names) and not any(name.startswith("seed-") for name in names):
            return names
    return list(map(str, paths))


def seed_run_name(name: str, path: str | Path, run_dir: Path) -> str:
    """Return the name of one run of a directory with several seeds; `name` is the directory's."""
    return name if run_dir == Path(path) or is_export(path) else f"{name}/{(find_export(run_dir) or run_dir).name}"


def seed_runs(path: str | Path) -> list[Path]:
    """Return the runs of a path: itself or its seed-0, seed-1, … in order; for exported runs, their results folders."""
    folder = Path(path)
    if is_run_dir(folder):
        return [folder]
    if is_export(folder):
        return [prepare_export(folder)]
    seeds = sorted((x for x in folder.glob("seed-*") if x.name[5:].isdecimal()), key=lambda x: int(x.name[5:]))
    runs = [entry for entry in seeds if is_run_dir(entry) or is_export(entry)]
    if not runs:
        for entry in (folder, *seeds):
            check_not_empty_run(entry)
        run = folder.absolute().parent.parent
        if folder.absolute().parent.name == "steps" and is_run_dir(run):
            raise InputError(f"{folder} is a checkpoint; give its run {run} and --checkpoint {folder.name}")
        raise InputError(f"{folder} is not a run directory; give one that laconic train or export wrote")
    return [run if is_run_dir(run) else prepare_export(run) for run in runs]


def prepare_export(export: Path, name: str | None = None) -> Path:
    """Create the folder in laconic's cache in which the results of an exported run are stored, as those of a run are.

    The folder has the run's recipe, and is named after the last part of `name`, by default the exported folder's path;
    one called seed-0, seed-1, … lies in a folder named after the part before. A new export of the run gets a new
    folder.
    """
    path = Path(name or export.resolve())
    recipe = (export / EXPORT_FOLDER / RECIPE_FILE).read_text(encoding="utf-8")
    parts = path.parts[-2:] if path.name.startswith("seed-") else path.parts[-1:]
    files = {EXPORT_MARKER: to_canonical_json({"export": str(export.resolve())}), RECIPE_FILE: recipe}
    return create_results_folder([str(export.resolve()), hash_export(export)], parts, files)


def create_results_folder(key: Sequence[Any], parts: Sequence[str], files: Mapping[str, str]) -> Path:
    """Create the folder in laconic's cache whose results depend on `key`, unless it exists; its recipe comes last."""
    names = [re.sub(r"[^\w.-]", "-", part) for part in parts]
    results = cache_dir().joinpath("evaluations", hash_json(key)[:8], *names)
    if not (results / RECIPE_FILE).is_file():
        results.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text_atomically(results / name, text)
    return results


def find_export(results: Path) -> Path | None:
    """Return the exported run of a results folder; None for another folder."""
    marker = results / EXPORT_MARKER
    return Path(read_json(marker)["export"]) if marker.is_file() else None


def describe_folder(folder: Path) -> str:
    """Return a run's folder for a message; for a results folder, that of the exported run."""
    return str(find_export(folder) or folder)


def hash_export(export: Path) -> str:
    """Return a hash of everything in an exported run that determines its answers."""
    record = read_export_record(export)
    assert record is not None
    return hash_json([dict(record.metadata), dict(record.files)])


def load_step(folder: Path, device: torch.device, checkpoint_name: str) -> LoadedRun:
    run = load_run(find_export(folder) or folder, device, resolve_step(folder, checkpoint_name))
    return replace(run.merge_for_answers(), folder=folder)


def load_recipes(paths: Sequence[str | Path]) -> dict[Path, Recipe]:
    return {folder: load_recipe(folder / RECIPE_FILE)[0] for path in paths for folder in seed_runs(path)}


def resolve_step(folder: Path, checkpoint_name: str) -> int | None:
    """Return the step of a checkpoint called "latest", "best" (by the run's validation) or by its number.

    An exported run has only one, for which the result is None.
    """
    if checkpoint_name.isdecimal():
        return int(checkpoint_name)
    if find_export(folder) is not None:
        if checkpoint_name != "latest":
            raise UsageError(f"--checkpoint {checkpoint_name}: {folder.name} has only one; remove --checkpoint")
        return None
    latest = latest_step(folder)
    if checkpoint_name == "latest":
        return latest.step
    steps = RunDirectory(folder).step_numbers()
    train = load_recipe(folder / RECIPE_FILE)[0].train
    best = [step for _, step in read_validations(folder).list_best(train) if step in steps]
    if checkpoint_name != "best" or not best:
        hint = "latest, a number, or best for a run that was validated and has train.best_metric"
        raise UsageError(f"--checkpoint {checkpoint_name}: not available in {folder}; give {hint}")
    return best[0]


def step_hash(folder: Path, step: int) -> str:
    export = find_export(folder)
    if export is not None:
        return hash_export(export)
    return sha256(RunDirectory(folder).get_step(step).manifest.canonical_text.encode()).hexdigest()


@contextmanager
def flush_denormals(device: torch.device) -> Iterator[None]:
    """Treat subnormal numbers as 0 on a CPU, as in training: each costs as much as a hundred others."""
    torch.set_flush_denormal(device.type == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
