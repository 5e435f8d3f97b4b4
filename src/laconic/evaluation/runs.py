"""Runs under evaluation: their seeds and checkpoints, what identifies their results, and an end on a signal."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.console import status
from laconic.errors import InputError, PreemptedError, UsageError, translate_os_errors
from laconic.evaluation.results_store import (
    EVALUATIONS_FOLDER,
    EvalKind,
    EvalMetadata,
    EvalRecord,
    StoredEvaluation,
    latest_evaluations,
    load_records,
)
from laconic.evaluation.run_names import short_run_names
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun, is_run_dir, latest_step, load_run
from laconic.storage.run_dir import RunDirectory
from laconic.storage.strict_json import read_json
from laconic.training import checkpoint
from laconic.training.signals import SignalInterruptError, StopSignal


@dataclass(frozen=True)
class EvalRequest:
    """Which runs to evaluate on which tasks.

    Attributes:
        runs: Run directories, or directories of runs seed-0, seed-1, …
        tasks: Names of data sets or streams, or files.
        limit: Number of items per task, from the first; None for all.
        checkpoint: "latest", "best" or a step number.
        device: Where models are loaded.
        stop: Whether a signal asked to stop.
    """

    runs: Sequence[str]
    tasks: Sequence[str]
    limit: int | None
    checkpoint: str
    device: torch.device
    stop: StopSignal

    def load_run(self, folder: Path) -> LoadedRun:
        """Load a run at the requested checkpoint and create its `evaluations` folder."""
        with status(f"loading {folder}"):
            run = load_run(folder, self.device, resolve_step(folder, self.checkpoint))
        with translate_os_errors(folder / EVALUATIONS_FOLDER):
            (folder / EVALUATIONS_FOLDER).mkdir(exist_ok=True)
        return run


@dataclass(frozen=True)
class StoredTask:
    """Stored results of one run on one task; the tuples have one entry per seed."""

    title: str
    recipe: Recipe
    stored: tuple[StoredEvaluation, ...]
    records: tuple[list[EvalRecord], ...]

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.stored[0].metadata.task

    @property
    def variant(self) -> Mapping[str, str]:
        """Options of the evaluation."""
        return self.stored[0].metadata.variant

    @property
    def seeds(self) -> tuple[int, ...]:
        """Training seeds."""
        return tuple(entry.metadata.seed for entry in self.stored)


def seed_runs(path: str | Path) -> list[Path]:
    """Return the runs of a path: itself, or its seed-0, seed-1, … in order.

    Raises:
        InputError: The path is no run and holds none.
    """
    folder = Path(path)
    if is_run_dir(folder):
        return [folder]
    seeds = [entry for entry in folder.glob("seed-*") if entry.name[5:].isdecimal() and is_run_dir(entry)]
    if not seeds:
        raise InputError(
            f"{folder} is no run directory and has no seed-N directories; give one that laconic train wrote"
        )
    return sorted(seeds, key=lambda entry: int(entry.name[5:]))


def load_recipes(paths: Sequence[str | Path]) -> dict[Path, Recipe]:
    """Load the recipes of all runs of some paths."""
    return {folder: load_recipe(folder / RECIPE_FILE)[0] for path in paths for folder in seed_runs(path)}


def resolve_step(folder: Path, checkpoint_name: str) -> int:
    """Return the step of a checkpoint called "latest", "best" (by the run's validation) or by its number."""
    if checkpoint_name.isdecimal():
        return int(checkpoint_name)
    latest = latest_step(folder)
    if checkpoint_name in ("latest", "newest"):
        return latest.step
    best = read_json(latest.path / checkpoint.PROGRESS_FILE)["best"] if checkpoint_name == "best" else None
    if not best:
        why = "the recipe has no train.best_metric" if checkpoint_name == "best" else "give latest, best or a number"
        raise UsageError(f"--checkpoint {checkpoint_name}: not available in {folder}; {why}")
    return int(best[0][1])


def describe_evaluation(
    run: LoadedRun,
    kind: EvalKind,
    task: str,
    *,
    limit: int | None = None,
    shots: int | None = None,
    variant: Mapping[str, str] | None = None,
    key: Mapping[str, str] | None = None,
) -> EvalMetadata:
    """Return the metadata of an evaluation of a run; the checkpoint's hash is added to `key`."""
    folder = run.folder.resolve()
    name = folder.parent.name if folder.name.startswith("seed-") else folder.name
    key = {"checkpoint": step_hash(run.folder, run.step), **(key or {})}
    return EvalMetadata(kind, task, name, run.recipe.seed, run.step, limit, shots, variant or {}, key)


def copy_recipe(run: LoadedRun) -> dict[str, str]:
    """Return the run's recipe as an extra file to store beside results."""
    return {RECIPE_FILE: (run.folder / RECIPE_FILE).read_text(encoding="utf-8")}


def step_hash(folder: Path, step: int) -> str:
    """Return the SHA-256 of a checkpoint's manifest."""
    return sha256(RunDirectory(folder).get_step(step).manifest.canonical_text.encode()).hexdigest()


@contextmanager
def flush_denormals(device: torch.device) -> Iterator[None]:
    """Treat subnormal numbers as 0 on a CPU, as in training: each costs as much as a hundred others."""
    torch.set_flush_denormal(device.type == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def interruptible_evaluation(stop: StopSignal, device: torch.device, label: str) -> Iterator[None]:
    """Turn a signal during an evaluation into a `PreemptedError`; what is finished by then is stored.

    Args:
        stop: The signal.
        device: Device of the model; on a CPU subnormal numbers are flushed.
        label: Run and task, for the message.
    """
    try:
        with flush_denormals(device), stop.interruptible():
            yield
    except SignalInterruptError:
        raise PreemptedError(f"{stop.signal_name}: {label}: {RESUME_HINT}") from None


RESUME_HINT = "finished items are stored; run the same command again to resume"


def load_stored_tasks(paths: Sequence[str], kind: EvalKind) -> list[StoredTask]:
    """Load what runs have stored of one kind of evaluation, grouped by run and task.

    Of each task it takes the latest step, and of those the evaluation with the most items.

    Args:
        paths: Run directories, or directories of several seeds.
        kind: Which evaluations to load.

    Returns:
        One entry per run, task and variant.

    Raises:
        InputError: Seeds of a run were evaluated on different items.
    """
    tasks: list[StoredTask] = []
    for path, title in zip(paths, short_run_names(paths), strict=True):
        recipes = load_recipes([path])
        per_seed = [latest_evaluations(folder / EVALUATIONS_FOLDER, kind) for folder in recipes]
        for group in dict.fromkeys(group for stored in per_seed for group in stored):
            seeds = [stored[group] for stored in per_seed if group in stored]
            records = tuple(load_records(entry.folder) for entry in seeds)
            items = {tuple((record.item, record.condition) for record in entry) for entry in records}
            if len(items) > 1 or len({entry.metadata.key.get("data") for entry in seeds}) > 1:
                raise InputError(f"{path}: seeds have results on different items of {group[1]}; evaluate them together")
            tasks.append(StoredTask(title, next(iter(recipes.values())), tuple(seeds), records))
    return tasks


def describe_runs(descriptions: Mapping[str, tuple[Mapping[str, Any], Sequence[int]]]) -> list[tuple[str, str]]:
    """Return what each run is as one line per run, from its title, properties and seeds."""
    return [
        (
            title,
            ", ".join(f"{k} {v}" for k, v in {**about, "seeds": ", ".join(map(str, seeds))}.items() if v is not None),
        )
        for title, (about, seeds) in descriptions.items()
    ]
