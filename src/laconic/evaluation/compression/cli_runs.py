"""Runs that read, for `laconic evaluate` and `laconic report`: each run of each seed opened, read and kept."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import DOCUMENT_METHODS, Recipe
from laconic.console import progress, status
from laconic.errors import InputError, PreemptedError, UsageError, translate_os_errors
from laconic.evaluation import line_store as results_store
from laconic.evaluation import runs as reasoning_run
from laconic.evaluation.compression import cli_files
from laconic.evaluation.compression import evaluate as compression_evaluate
from laconic.evaluation.compression import table as compression_table
from laconic.evaluation.compression.context_qa import ContextTaskResult
from laconic.evaluation.compression.run import CompressionEvalSet, build_eval_sets
from laconic.evaluation.compression.table import CompressionResult
from laconic.evaluation.run_names import seed_run_name, short_run_names
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun, load_run
from laconic.storage import lock
from laconic.training.signals import SignalInterruptError, StopSignal


@dataclass(frozen=True)
class CompressionEvalRequest:
    """What is asked of which runs; the signal that ends it."""

    runs: Sequence[str]
    sets: Sequence[str]
    limit: int | None
    step: str
    query_aware: bool
    device: torch.device
    stop: StopSignal

    def load_run(self, folder: Path) -> LoadedRun:
        """A run at the step asked for, with a place for what is kept."""
        with status(f"loading {folder}"):
            run = load_run(folder, self.device, reasoning_run.resolve_step(folder, self.step))
        with translate_os_errors(folder / reasoning_run.EVALUATIONS_FOLDER):
            (folder / reasoning_run.EVALUATIONS_FOLDER).mkdir(exist_ok=True)
        return run


def reads_documents(runs: Sequence[str]) -> bool:
    """Whether the runs read documents. Raises `Usage` (2) for some that do beside some that answer questions."""
    recipes = {
        folder: load_recipe(folder / RECIPE_FILE)[0] for path in runs for folder in reasoning_run.seed_runs(path)
    }
    kinds = {folder: recipe.method in DOCUMENT_METHODS for folder, recipe in recipes.items()}
    if len(set(kinds.values())) > 1:
        one, other = (next(folder for folder, kind in kinds.items() if kind is wanted) for wanted in (True, False))
        raise UsageError(f"{one} reads documents, {other} answers questions; evaluate them by themselves")
    return all(kinds.values())


def run_evaluations(request: CompressionEvalRequest) -> list[CompressionResult]:
    """Every run on every set. Raises `Usage` (2) for a set that is none of documents."""
    for name in request.sets:
        if name not in cli_files.HELD_OUT_SETS and not cli_files.is_row_file(name):
            raise UsageError(
                f"--tasks {name}: of runs that read documents the sets are {', '.join(cli_files.HELD_OUT_SETS)}, and files of rows"
            )
    titles = short_run_names(request.runs)
    found = [
        line for path, title in zip(request.runs, titles, strict=True) for line in evaluate_run(request, path, title)
    ]
    order = list(dict.fromkeys(line.dataset for line in found))
    return compression_table.add_controls(sorted(found, key=lambda line: order.index(line.dataset)))


def evaluate_row_files(request: CompressionEvalRequest) -> list[ContextTaskResult]:
    """What every run says to the files among the sets."""
    files = [name for name in request.sets if cli_files.is_row_file(name)]
    paths = dict(zip(request.runs, short_run_names(request.runs), strict=True)) if files else {}
    return cli_files.evaluate_files(paths, files, request.limit, request.query_aware, request.stop, request.load_run)


def evaluate_run(request: CompressionEvalRequest, path: str, title: str) -> list[CompressionResult]:
    """A run, or the runs of several seeds, on every set."""
    rows, seeds, about = dict[str, list[Any]](), list[int](), dict[str, Any]()
    for folder in reasoning_run.seed_runs(path):
        run = request.load_run(folder)
        seeds.append(run.recipe.seed)
        about = describe_recipe(run.recipe)
        with lock.lock_folder(folder / reasoning_run.EVALUATIONS_FOLDER):
            for each, found in evaluate_sets(request, run, seed_run_name(title, path, folder)):
                rows.setdefault(each.name, []).append(found)
    return [CompressionResult(name, title, tuple(seeds), found, about) for name, found in rows.items()]


def evaluate_sets(
    request: CompressionEvalRequest, run: LoadedRun, name: str
) -> Iterator[tuple[CompressionEvalSet, list[compression_evaluate.DocumentResult]]]:
    """One run on every set, in every way; what is kept already is read."""
    for asked in (name for name in request.sets if name in cli_files.HELD_OUT_SETS):
        for each in build_eval_sets(run, asked, request.limit):
            folder = (
                run.folder / reasoning_run.EVALUATIONS_FOLDER / result_folder_name(each.name, run.step, request.limit)
            )
            with progress(f"{name} {each.name}") as show:
                yield each, evaluate_set(request, run, each, folder, show)


def result_folder_name(name: str, step: int, limit: int | None) -> str:
    """Where in evaluations/ the rows lie."""
    return f"{name}-reading-step-{step}" + (f"-first-{limit}" if limit is not None else "")


def evaluate_set(
    request: CompressionEvalRequest,
    run: LoadedRun,
    eval_set: CompressionEvalSet,
    folder: Path,
    show: compression_evaluate.ProgressCallback,
) -> list[compression_evaluate.DocumentResult]:
    """A run on a set. Raises `Preempted` (75) after a signal: what is read is kept."""
    key = {
        "step": reasoning_run.step_hash(run.folder, run.step),
        "rows": str(request.limit),
        "seed": str(run.recipe.seed),
    }
    about = {"set": eval_set.name, "step": run.step, "seed": run.recipe.seed, **describe_recipe(run.recipe)}

    def figures(rows: Sequence[compression_evaluate.DocumentResult]) -> dict[str, Any]:
        return {
            "schema": 1,
            **compression_table.result_to_json(
                CompressionResult(eval_set.name, folder.name, (run.recipe.seed,), [rows], about)
            ),
        }

    try:
        with reasoning_run.flush_denormals(request.device), request.stop.interruptible():
            return compression_evaluate.evaluate_conditions(
                eval_set.source, eval_set.conditions, request.device, batch_size=eval_set.batch_size, folder=folder, key=key,
                texts={RECIPE_FILE: (run.folder / RECIPE_FILE).read_text(encoding="utf-8")}, summarise=figures, progress=show,
            )  # fmt: skip
    except SignalInterruptError:
        rest = "what is read is kept; run the same command again to go on"
        raise PreemptedError(f"{request.stop.signal_name}: {run.folder}, {eval_set.name}: {rest}") from None


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """What a run is, as far as its figures depend on it."""
    how = recipe.compression
    found: dict[str, Any] = {"method": recipe.method, "kind": recipe.data.source, "row": recipe.table_row}
    if how is None or recipe.method == "lm":
        return found | {"length": None}
    cell = {"generator": how.summary, "length": how.length_policy, "memory": how.memory_policy, "cap": how.fixed_length}
    if how.length_policy != "stop_head" or recipe.stop_head is None:
        return found | cell
    halting = recipe.stop_head
    return found | cell | {"estimator": halting.estimator, "gate": halting.soft_gate, "stop_head": halting.head,
                           "price": halting.length_cost}  # fmt: skip


def print_results(
    results: Sequence[CompressionResult], file_results: Sequence[ContextTaskResult], as_json: bool
) -> None:
    """The figures on standard output."""
    if as_json:
        made = {"schema": 1, "lines": [compression_table.result_to_json(line) for line in results],
                "files": [each.to_json() for each in file_results]}  # fmt: skip
        print(json.dumps(made, ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console

    print(
        "\n".join(text for each in file_results for text in cli_files.format_result(each)),
        end="\n" if file_results else "",
    )
    if not results:
        return
    wide = Console(highlight=False)
    (wide if wide.is_terminal else Console(highlight=False, width=240)).print(compression_table.build_table(results))
    print(compression_table.table_footnotes(results))


def load_results(paths: Sequence[str]) -> list[CompressionResult]:
    """What the evaluations of runs hold, of each set the newest step's, and of those the most rows.

    Raises `BadInput` (66) for seeds that read other documents.
    """
    found: list[CompressionResult] = []
    for path, title in zip(paths, short_run_names(paths), strict=True):
        folders = reasoning_run.seed_runs(path)
        recipes = [load_recipe(folder / RECIPE_FILE)[0] for folder in folders]
        by_seed = [find_latest_folders(folder) for folder in folders]
        for name in by_seed[0]:
            rows = [
                [compression_evaluate.parse_result(text) for text in results_store.read_lines(each[name])]
                for each in by_seed
                if name in each
            ]
            check_same_documents(path, name, rows)
            seeds = [r.seed for r, each in zip(recipes, by_seed, strict=True) if name in each]
            about = {**describe_recipe(recipes[0]), "step": by_seed[0][name].name.split("-step-")[1].split("-")[0]}
            found.append(CompressionResult(name, title, tuple(seeds), rows, about))
    order = sorted({line.dataset for line in found}, key=lambda name: ("excerpt" in name, len(name), name))
    return compression_table.add_controls(sorted(found, key=lambda line: order.index(line.dataset)))


def find_latest_folders(run: Path) -> dict[str, Path]:
    """Of each set the folder of its newest step with the most rows."""
    found: dict[str, tuple[tuple[int, float], Path]] = {}
    for folder in sorted((run / reasoning_run.EVALUATIONS_FOLDER).glob("*-reading-step-*")):
        name, _, rest = folder.name.partition("-reading-step-")
        step, _, first = rest.partition("-first-")
        rank = (int(step), float(first) if first else float("inf"))
        if not folder.name.startswith(".") and (name not in found or rank > found[name][0]):
            found[name] = (rank, folder)
    return {name: folder for name, (_, folder) in found.items()}


def check_same_documents(path: str, name: str, rows: Sequence[Sequence[compression_evaluate.DocumentResult]]) -> None:
    """Raises `BadInput` (66) unless the seeds of a run read the same documents."""
    if len({tuple(row.id for row in each) for each in rows}) > 1:
        raise InputError(f"{path}: its seeds read other documents of {name}; evaluate them in one command")


def describe_runs(paths: Sequence[str]) -> list[tuple[str, str]]:
    """What each run is."""
    found: list[tuple[str, str]] = []
    for path, title in zip(paths, short_run_names(paths), strict=True):
        recipes = [load_recipe(folder / RECIPE_FILE)[0] for folder in reasoning_run.seed_runs(path)]
        about = {**describe_recipe(recipes[0]), "seeds": ", ".join(str(recipe.seed) for recipe in recipes)}
        found.append((title, ", ".join(f"{k} {v}" for k, v in about.items() if v is not None)))
    return found
