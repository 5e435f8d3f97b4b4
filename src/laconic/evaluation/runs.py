"""Runs under evaluation: their names, seeds and checkpoints, and an environment as in training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.errors import InputError, UsageError
from laconic.experiment.load_run import RECIPE_FILE, is_export, is_run_dir, latest_step
from laconic.storage.run_dir import RunDirectory
from laconic.training.validation_log import read_validations


def short_run_names(paths: Sequence[str | Path]) -> list[str]:
    """Return short unique names of runs: the last parts of their paths; `seed-0` alone is not a name."""
    for n in (1, 2, 3):
        names = ["/".join(Path(path).resolve().parts[-n:]) for path in paths]
        if len(set(names)) == len(names) and not any(name.startswith("seed-") for name in names):
            return names
    return list(map(str, paths))


def seed_run_name(name: str, path: str | Path, run_dir: Path) -> str:
    """Return the name of one run of a directory with several seeds; `name` is the directory's."""
    return name if run_dir == Path(path) else f"{name}/{run_dir.name}"


def seed_runs(path: str | Path) -> list[Path]:
    """Return the runs of a path: itself, or its seed-0, seed-1, … in order.

    Raises:
        InputError: The path is no run and holds none.
    """
    folder = Path(path)
    if is_run_dir(folder):
        return [folder]
    seeds = [entry for entry in folder.glob("seed-*") if entry.name[5:].isdecimal() and is_run_dir(entry)]
    if is_export(folder):
        raise InputError(f"{folder} is an exported run, which has no data; give the run that it was exported from")
    if not seeds:
        raise InputError(
            f"{folder} is no run directory and has no seed-N directories; give one that laconic train wrote"
        )
    return sorted(seeds, key=lambda entry: int(entry.name[5:]))


def load_recipes(paths: Sequence[str | Path]) -> dict[Path, Recipe]:
    return {folder: load_recipe(folder / RECIPE_FILE)[0] for path in paths for folder in seed_runs(path)}


def resolve_step(folder: Path, checkpoint_name: str) -> int:
    """Return the step of a checkpoint called "latest", "best" (by the run's validation) or by its number."""
    if checkpoint_name.isdecimal():
        return int(checkpoint_name)
    latest = latest_step(folder)
    if checkpoint_name == "latest":
        return latest.step
    steps = RunDirectory(folder).step_numbers()
    train = load_recipe(folder / RECIPE_FILE)[0].train
    best = [step for _, step in read_validations(folder).list_best(train) if step in steps]
    if checkpoint_name != "best" or not best:
        why = "the recipe has no train.best_metric" if train.best_metric is None else "no step was validated yet"
        why = why if checkpoint_name == "best" else "give latest, best or a number"
        raise UsageError(f"--checkpoint {checkpoint_name}: not available in {folder}; {why}")
    return best[0]


def step_hash(folder: Path, step: int) -> str:
    return sha256(RunDirectory(folder).get_step(step).manifest.canonical_text.encode()).hexdigest()


@contextmanager
def flush_denormals(device: torch.device) -> Iterator[None]:
    """Treat subnormal numbers as 0 on a CPU, as in training: each costs as much as a hundred others."""
    torch.set_flush_denormal(device.type == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
