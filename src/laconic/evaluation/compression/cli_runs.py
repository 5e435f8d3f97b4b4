"""Evaluate compressors on held-out documents for `laconic evaluate`, and load stored results for `laconic report`."""

import json
from collections.abc import Sequence
from typing import Any

from laconic.config.recipe import DOCUMENT_METHODS, Recipe
from laconic.console import progress
from laconic.errors import UsageError
from laconic.evaluation import runs, tables
from laconic.evaluation.compression import table
from laconic.evaluation.compression.cli_files import format_result, is_row_file
from laconic.evaluation.compression.context_qa import ContextTaskResult
from laconic.evaluation.compression.evaluate import DocumentResult, evaluate_conditions, group_records
from laconic.evaluation.compression.run import EXCERPT, CompressionEvalSet, build_eval_sets
from laconic.evaluation.compression.table import CompressionResult
from laconic.evaluation.results_store import EVALUATIONS_FOLDER
from laconic.evaluation.run_names import seed_run_name, short_run_names
from laconic.evaluation.runs import EvalRequest, load_stored_tasks, seed_runs
from laconic.experiment.load_run import LoadedRun
from laconic.storage import lock

HELD_OUT_SETS = ("test", "valid", EXCERPT)


def reads_documents(paths: Sequence[str]) -> bool:
    """Return whether the runs were trained on documents.

    Raises:
        UsageError: If some were and some answer questions.
    """
    reads = {folder: recipe.method in DOCUMENT_METHODS for folder, recipe in runs.load_recipes(paths).items()}
    if len(set(reads.values())) > 1:
        one, other = (next(folder for folder, value in reads.items() if value is kind) for kind in (True, False))
        raise UsageError(f"{one} reads documents, {other} answers questions; evaluate them separately")
    return all(reads.values())


def run_evaluations(request: EvalRequest) -> list[CompressionResult]:
    """Evaluate every run on every held-out set of the request.

    Raises:
        UsageError: If a task is neither a held-out set nor a file of rows.
        PreemptedError: After a signal; finished documents are stored.
    """
    for name in request.tasks:
        if name not in HELD_OUT_SETS and not is_row_file(name):
            raise UsageError(
                f"--tasks {name}: runs that read documents have {', '.join(HELD_OUT_SETS)}, and files of rows"
            )
    titles = short_run_names(request.runs)
    results = [
        result
        for path, title in zip(request.runs, titles, strict=True)
        for result in evaluate_run(request, path, title)
    ]
    order = list(dict.fromkeys(result.dataset for result in results))
    return table.add_controls(sorted(results, key=lambda result: order.index(result.dataset)))


def evaluate_run(request: EvalRequest, path: str, title: str) -> list[CompressionResult]:
    """Evaluate the seeds of a run on every held-out set."""
    documents, seeds, run_info = dict[str, list[list[DocumentResult]]](), list[int](), dict[str, Any]()
    for folder in seed_runs(path):
        run = request.load_run(folder)
        seeds.append(run.recipe.seed)
        run_info, name = describe_recipe(run.recipe), seed_run_name(title, path, folder)
        with lock.lock_folder(folder / EVALUATIONS_FOLDER):
            for split in (name for name in request.tasks if name in HELD_OUT_SETS):
                for eval_set in build_eval_sets(run, split, request.limit):
                    documents.setdefault(eval_set.name, []).append(evaluate_set(request, run, eval_set, name))
    return [CompressionResult(name, title, tuple(seeds), by_seed, run_info) for name, by_seed in documents.items()]


def evaluate_set(request: EvalRequest, run: LoadedRun, eval_set: CompressionEvalSet, name: str) -> list[DocumentResult]:
    """Evaluate a run on a data set, or load its stored results."""
    metadata = runs.describe_evaluation(run, "compression", eval_set.name, limit=request.limit)
    run_info = describe_recipe(run.recipe)

    def summarize(documents: Sequence[DocumentResult]) -> dict[str, Any]:
        result = CompressionResult(eval_set.name, metadata.run, (run.recipe.seed,), [documents], run_info)
        return table.result_to_json(result)

    label = f"{name} {eval_set.name}"
    with progress(label) as show, runs.interruptible_evaluation(request.stop, request.device, label):
        return evaluate_conditions(
            eval_set.source,
            eval_set.conditions,
            request.device,
            metadata,
            batch_size=eval_set.batch_size,
            folder=run.folder / EVALUATIONS_FOLDER,
            extra_files=runs.copy_recipe(run),
            summarize=summarize,
            progress=show,
        )


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of a run that its figures depend on."""
    config, head = recipe.compression, recipe.stop_head
    run_info: dict[str, Any] = {"method": recipe.method, "source": recipe.data.source, "table_row": recipe.table_row}
    if config is None or recipe.method == "lm":
        return run_info | {"length_policy": None}
    run_info |= {
        "summary": config.summary,
        "length_policy": config.length_policy,
        "memory_policy": config.memory_policy,
        "max_vectors": config.fixed_length,
    }
    if config.length_policy != "stop_head" or head is None:
        return run_info
    return run_info | {
        "estimator": head.estimator,
        "soft_gate": head.soft_gate,
        "head": head.head,
        "length_cost": head.length_cost,
    }


def print_results(
    results: Sequence[CompressionResult], file_results: Sequence[ContextTaskResult], as_json: bool
) -> None:
    """Print results on standard output."""
    if as_json:
        data = {
            "schema": 1,
            "results": [table.result_to_json(result) for result in results],
            "files": [result.to_json() for result in file_results],
        }
        print(json.dumps(data, ensure_ascii=False, allow_nan=False))
        return
    for line in (line for result in file_results for line in format_result(result)):
        print(line)
    if results:
        tables.print_table(table.build_table(results))
        print(table.table_footnotes(results))


def load_results(paths: Sequence[str]) -> list[CompressionResult]:
    """Load the stored results of runs: of each data set the latest step with the most documents.

    Raises:
        InputError: If the seeds of a run were evaluated on different documents.
    """
    results = [
        CompressionResult(
            stored.task,
            stored.title,
            stored.seeds,
            [group_records(records) for records in stored.records],
            {**describe_recipe(stored.recipe), "step": str(stored.stored[0].metadata.step)},
        )
        for stored in load_stored_tasks(paths, "compression")
    ]
    names = {result.dataset for result in results}
    order = sorted(names, key=lambda name: (EXCERPT in name, len(name), name))
    return table.add_controls(sorted(results, key=lambda result: order.index(result.dataset)))


def describe_runs(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name of each run and its settings as text."""
    descriptions = {}
    for path, title in zip(paths, short_run_names(paths), strict=True):
        recipes = list(runs.load_recipes([path]).values())
        descriptions[title] = describe_recipe(recipes[0]), [recipe.seed for recipe in recipes]
    return runs.describe_runs(descriptions)
