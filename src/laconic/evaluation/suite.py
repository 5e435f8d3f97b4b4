"""Evaluate runs on tasks: the runner, its results and the interface of a suite, shared by every kind of task.

A suite is a group of tasks for one kind of run. To add a task, write one module with

1. a function that returns an `EvalJob` for a run: its metadata, the number of items, and `evaluate`, which returns an
   `EvalItem` (metrics by condition) for each of the given item indices,
2. a list of `Column` over `RunResult`, or over rows computed from it, for its table on the terminal and on the page,

and call both from a suite's `build_jobs`, `report` and `build_sections`. Results with metrics of their own have a kind
of their own in `results_store.EvalKind` and in the suite's `kinds`; `laconic.cli.commands.tasks` lists the task's name.
A new kind of run has a suite of its own, which `laconic.evaluation.suites` lists; tests/evaluation/test_suite.py has
one.
Seeds, locks, resuming, storage, progress, signals and ranks are handled here; `laconic report` loads the results.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from laconic.config.recipe import Recipe
from laconic.console import ProgressFn, progress, status
from laconic.errors import InputError, PreemptedError, translate_os_errors
from laconic.evaluation import results_store, runs
from laconic.evaluation.checkpoints import load_checkpoint_run, read_prompt
from laconic.evaluation.report.page import PageSection
from laconic.evaluation.results_store import (
    EVALUATIONS_FOLDER,
    EvalItem,
    EvalJob,
    EvalKind,
    EvalMetadata,
    StoredEvaluation,
)
from laconic.evaluation.statistics import ScoreMatrix
from laconic.evaluation.tables import Table
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun
from laconic.storage import lock
from laconic.storage.atomic import check_not_link, remove_temporary
from laconic.training.ranks import Ranks
from laconic.training.signals import SignalInterruptError, StopSignal

DEFAULT_TOKENS = 1024  # to which documents are cut
CHARACTERS_PER_TOKEN = 16  # of a document that is tokenized, so that books are not tokenized to their end
RESUME_HINT = "finished items are stored; run the same command again to resume"


@dataclass(frozen=True)
class EvalRequest:
    """What `laconic evaluate` asks for; each suite uses the options that concern it.

    `stop` interrupts, and `ranks` are the processes that share each batch. The other fields are flags of the command,
    as `laconic.cli.commands.evaluate.EvaluateCommand` explains them, or the default of a flag.
    """

    runs: Sequence[str]
    tasks: Sequence[str]
    device: torch.device
    stop: StopSignal
    ranks: Ranks = field(default_factory=Ranks)
    limit: int | None = None
    checkpoint: str = "latest"
    batch_size: int = 64
    data_dir: str | None = None
    shots: int | None = None
    protocol: str | None = None
    tolerance: Decimal | None = None
    with_cot: bool = False
    jacobi_iterations: Sequence[int] = ()
    jacobi_tolerance: Sequence[float] = ()
    baseline: str | None = None
    latency: int = 0
    documents: str | None = None
    questions: str | None = None
    methods: Sequence[str] = ()
    keep: Sequence[float] = (0.125,)
    tokens: int | None = None
    fit: int | None = None

    @property
    def paths(self) -> list[str]:
        return list(dict.fromkeys((*self.runs, *([self.baseline] if self.baseline else ()))))

    def document_tokens(self, most: int) -> int:
        """Return the length to which documents are cut, for a model that reads documents of `most` tokens."""
        return min(DEFAULT_TOKENS, most) if self.tokens is None else self.tokens

    def load_run(self, folder: Path) -> LoadedRun:
        is_checkpoint = read_prompt(folder) is not None
        with status(f"loading {folder.name if is_checkpoint or runs.find_export(folder) is not None else folder}"):
            if is_checkpoint:
                return load_checkpoint_run(folder, self.device)
            return runs.load_step(folder, self.device, self.checkpoint)


@dataclass(frozen=True)
class RunResult:
    """The items of a run, of one seed or several, on one task.

    `info` has properties of the run, as the suite describes its recipe; `variant` the options of the evaluation;
    `limit` the number of items, where the task was cut to its first ones; `figures` the stored summary figures of each
    seed. The first job's data, `source`, is None for results that were loaded.
    """

    run: str
    task: str
    seeds: tuple[int, ...]
    items_by_seed: Sequence[Sequence[EvalItem]]
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    variant: Mapping[str, str] = field(default_factory=dict[str, str])
    limit: int | None = None
    steps: tuple[int, ...] = ()
    figures: Sequence[Mapping[str, Any]] = ()
    notes: tuple[str, ...] = ()
    source: Any = None

    @cached_property
    def conditions(self) -> list[str]:
        """The conditions that every item of every seed has, in order."""
        first = self.items_by_seed[0][0]
        return [name for name in first.conditions if all(name in item.conditions for item in self.pooled_items)]

    @property
    def pooled_items(self) -> list[EvalItem]:
        return [item for items in self.items_by_seed for item in items]

    def scores(self, condition: str, score: Callable[[Mapping[str, Any]], float]) -> ScoreMatrix:
        """Return a score of every item, computed from its metrics under a condition, [seeds, items]."""
        return np.array([[score(item.conditions[condition]) for item in items] for items in self.items_by_seed])


Results = Mapping[EvalKind, Sequence[RunResult]]


class EvalReport(NamedTuple):
    """What `laconic evaluate` prints: tables and lines for a terminal, and one JSON object."""

    blocks: Sequence[Table | str]
    data: Mapping[str, Any]


class EvalSuite(Protocol):
    """Tasks for one kind of run."""

    # The kinds of evaluations that it stores.
    kinds: Sequence[EvalKind]
    # The tasks or runs that it evaluates, in words, and the fields of `EvalRequest` that not every suite has.
    users: str
    options: Collection[str]

    # Return whether the suite evaluates these runs on these tasks.
    def accepts(self, recipes: Collection[Recipe], tasks: Collection[str]) -> bool: ...

    # Raise `UsageError`, before anything is evaluated, for what some run cannot do.
    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None: ...

    # Return the properties of a run that its results depend on.
    def describe(self, recipe: Recipe) -> dict[str, Any]: ...

    # Yield the evaluations of a run on a task; the run may be changed while a job is evaluated.
    def build_jobs(self, request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]: ...

    # Return the tables, lines and JSON for results.
    def report(self, request: EvalRequest, results: Results) -> EvalReport: ...

    # Return the sections of `laconic report` for stored results of the runs in `paths`.
    def build_sections(self, results: Results, paths: Sequence[str]) -> list[PageSection]: ...


def describe_evaluation(
    run: LoadedRun,
    kind: EvalKind,
    task: str,
    *,
    limit: int | None = None,
    shots: int | None = None,
    variant: Mapping[str, str] | None = None,
    key: Mapping[str, str] | None = None,
    suffix: str = "",
) -> EvalMetadata:
    """Return the metadata of an evaluation of a run; the checkpoint's hash is added to `key`."""
    prompt = read_prompt(run.folder)
    weights = runs.step_hash(run.folder, run.step) if prompt is None else run.parts.base
    quantization = {"quantize": prompt.quantize} if prompt is not None and prompt.quantize else {}
    key = {"checkpoint": weights, **quantization, **(key or {})}
    return EvalMetadata(
        kind,
        task,
        run=run_name(run.folder),
        seed=run.recipe.seed,
        step=run.step,
        limit=limit,
        shots=shots,
        variant=variant or {},
        key=key,
        suffix=suffix,
    )


def run_name(folder: Path) -> str:
    """Return the name of a run directory, without seed-0, seed-1, …"""
    folder = folder.resolve()
    return folder.parent.name if folder.name.startswith("seed-") else folder.name


def evaluate_runs(suite: EvalSuite, request: EvalRequest) -> Results:
    """Evaluate every seed of every run on every task; stored results are loaded and partial ones resumed."""
    suite.check(request, runs.load_recipes(request.paths))
    results: dict[EvalKind, list[RunResult]] = {kind: [] for kind in suite.kinds}
    for path, title in zip(request.paths, runs.short_run_names(request.paths), strict=True):
        per_group: dict[tuple[Any, ...], list[StoredEvaluation]] = {}
        info: dict[str, Any] = {}
        for folder in runs.seed_runs(path):
            run = request.load_run(folder)
            info = suite.describe(run.recipe)
            with lock_evaluations(folder, request.ranks):
                jobs = [job for task in request.tasks for job in suite.build_jobs(request, run, task)]
                for group, job in {job.metadata.group: job for job in jobs}.items():
                    name = runs.seed_run_name(title, path, folder)
                    variant = " ".join(job.metadata.variant.values())
                    verb = "auditing" if job.metadata.kind == "audit" else "evaluating"
                    label = f"{verb} {name} on {job.metadata.task}, {variant}".rstrip(", ")
                    with progress(label) if request.ranks.rank == 0 else nullcontext() as show:
                        items = evaluate_job(run, job, ranks=request.ranks, stop=request.stop, progress=show)
                    stored = results_store.load_stored(folder / EVALUATIONS_FOLDER / job.metadata.folder_name)
                    per_group.setdefault(group, []).append(stored._replace(items=items, source=job.source))
        for group, seeds in per_group.items():
            results[group[0]].append(merge_seeds(title, info, seeds))
    return results


def evaluate_job(
    run: LoadedRun,
    job: EvalJob,
    *,
    ranks: Ranks | None = None,
    stop: StopSignal | None = None,
    progress: ProgressFn | None = None,
) -> list[EvalItem]:
    """Evaluate one job of a run at one of its checkpoints and store its results in the run.

    `stop` interrupts at once in a single process, else before a batch.
    """
    is_single = ranks is None or ranks.world_size == 1

    def check_signal() -> None:
        if stop and ranks and not is_single and ranks.any_rank(bool(stop.signal)):
            raise SignalInterruptError

    files = {RECIPE_FILE: (run.folder / RECIPE_FILE).read_text(encoding="utf-8")}
    folder = run.folder / EVALUATIONS_FOLDER
    device = run.parts.decoder.device
    try:
        with runs.flush_denormals(device), stop.interruptible() if stop and is_single else nullcontext():
            return results_store.run_resumable(
                job, folder, extra_files=files, progress=progress, before_batch=check_signal, ranks=ranks
            )
    except SignalInterruptError:
        why = stop.signal_name if stop and stop.signal else "a signal to another rank"
        raise PreemptedError(f"{why}: {runs.describe_folder(run.folder)}, {job.metadata.task}: {RESUME_HINT}") from None


@contextmanager
def lock_evaluations(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Lock a run's `evaluations` folder and sweep it, once for all ranks; the run may be trained meanwhile."""
    evaluations = folder / EVALUATIONS_FOLDER
    if ranks.rank == 0:
        check_not_link(evaluations)
        with translate_os_errors(evaluations):
            evaluations.mkdir(exist_ok=True)
    with lock.lock_folder(evaluations) if ranks.rank == 0 else nullcontext():
        if ranks.rank == 0:
            remove_temporary(evaluations)
        ranks.all_gather(None)  # the others wait for the lock
        yield


def load_results(suite: EvalSuite, paths: Sequence[str], step: int | None = None) -> Results:
    """Load what runs have stored: of each task a step, by default the latest, and of it the one with the most items.

    There is one result per run, task and variant; the seeds of a run are put together.
    """
    return {
        kind: [
            result
            for path, title in zip(paths, runs.short_run_names(paths), strict=True)
            for result in load_seed_results(suite, kind, runs.seed_runs(path), title, step)
        ]
        for kind in suite.kinds
    }


def load_seed_results(
    suite: EvalSuite, kind: EvalKind, folders: Sequence[Path], title: str, step: int | None = None
) -> list[RunResult]:
    """Load the stored results of one kind of the seeds of a run; see `load_results`."""
    info = suite.describe(runs.load_recipes(folders[:1])[folders[0]])
    per_seed = [results_store.latest_evaluations(folder / EVALUATIONS_FOLDER, kind, step) for folder in folders]
    results: list[RunResult] = []
    for group in dict.fromkeys(group for stored in per_seed for group in stored):
        evaluations = [stored[group] for stored in per_seed if group in stored]
        seeds = [stored._replace(items=results_store.load_items(stored.folder)) for stored in evaluations]
        distinct = {tuple((item.id, *item.conditions) for item in seed.items) for seed in seeds}
        if len(distinct) > 1 or len({seed.metadata.key.get("data") for seed in seeds}) > 1:
            raise InputError(f"{title}: seeds have results on different items of {group[1]}; evaluate them together")
        results.append(merge_seeds(title, info, seeds))
    return results


def merge_seeds(title: str, info: Mapping[str, Any], seeds: Sequence[StoredEvaluation]) -> RunResult:
    first = seeds[0].metadata
    metadata = [seed.metadata for seed in seeds]
    return RunResult(
        run=title,
        task=first.task,
        seeds=tuple(m.seed for m in metadata),
        items_by_seed=[seed.items for seed in seeds],
        info=info,
        variant=first.variant,
        limit=first.limit,
        steps=tuple(m.step for m in metadata),
        figures=[seed.figures for seed in seeds],
        notes=tuple(dict.fromkeys(note for seed in seeds for note in seed.notes)),
        source=seeds[0].source,
    )
