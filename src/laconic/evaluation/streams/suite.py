"""Streams and class-incremental learning: what models with fast weights, and language models beside them, learn."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.config.recipe import Recipe
from laconic.errors import UsageError
from laconic.evaluation.checkpoints import read_prompt
from laconic.evaluation.class_incremental import report as class_report
from laconic.evaluation.class_incremental.intent_data import INTENT_DATASETS, find_class_file, is_class_task
from laconic.evaluation.class_incremental.run import build_class_job
from laconic.evaluation.report.page import PageSection
from laconic.evaluation.results_store import EvalJob, EvalKind
from laconic.evaluation.runs import describe_folder
from laconic.evaluation.streams import report as stream_report
from laconic.evaluation.streams.report import LEGEND, build_stream_table, describe_gains, result_to_json, stream_title
from laconic.evaluation.streams.tasks import (
    RECIPE_SPLITS,
    STREAM_NAMES,
    SYNTHETIC_STREAMS,
    build_stream_jobs,
    list_tasks,
)
from laconic.evaluation.suite import EvalReport, EvalRequest, Results
from laconic.evaluation.tables import Table
from laconic.experiment.load_run import LoadedRun

NESTED_METHOD, LM_METHOD = "hope", "lm"
TASK_NAMES = (*RECIPE_SPLITS, *STREAM_NAMES, *INTENT_DATASETS)


class StreamSuite:
    """Runs of method hope on any task, language models on tasks that have a name, checkpoints on sets with classes."""

    kinds: Sequence[EvalKind] = ("streams", "class_incremental")
    users = "sets with classes"
    options: Collection[str] = ("data_dir",)

    def accepts(self, recipes: Collection[Recipe], tasks: Collection[str]) -> bool:
        """Accept any task for method hope, streams for language models, and sets with classes for all."""
        methods = {recipe.method for recipe in recipes}
        are_streams = all(recipe.data.source in SYNTHETIC_STREAMS for recipe in recipes)
        has_stream_name = any(task in STREAM_NAMES or is_class_task(task) for task in tasks)
        return (
            NESTED_METHOD in methods
            or (methods == {LM_METHOD} and (are_streams or has_stream_name))
            or all(map(is_class_task, tasks))
        )

    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None:
        if request.data_dir is not None and not set(request.tasks) & set(INTENT_DATASETS):
            raise UsageError(f"--data-dir: only for {', '.join(INTENT_DATASETS)}; remove --data-dir")
        for folder, recipe in recipes.items():
            prompt = read_prompt(folder)
            if prompt is not None and all(map(is_class_task, request.tasks)):
                if prompt.quantize:
                    raise UsageError(f"--quantize {prompt.quantize}: rounded weights are not fine-tuned; remove it")
            elif recipe.method not in (NESTED_METHOD, LM_METHOD):
                raise UsageError(f"{folder}: method {recipe.method} has no streams; evaluate it by itself")
            known = (*list_tasks(recipe), *INTENT_DATASETS)
            name = next((name for name in request.tasks if name not in known and not find_class_file(name)), None)
            if name is not None:
                place = describe_folder(folder)
                raise UsageError(f"--tasks {name}: {place} has the tasks {', '.join(known)} and classes:FILE")

    def describe(self, recipe: Recipe) -> dict[str, Any]:
        return {"method": recipe.method, "source": recipe.data.source}

    def build_jobs(self, request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]:
        if is_class_task(task):
            yield build_class_job(request, run, task)
        else:
            yield from build_stream_jobs(request, run, task)

    def report(self, request: EvalRequest, results: Results) -> EvalReport:
        titles = list(map(stream_title, results["streams"]))
        streams = sorted(results["streams"], key=lambda result: titles.index(stream_title(result)))
        classes = list(iter_class_results(results))
        blocks: list[Table | str] = []
        if streams:
            blocks += [build_stream_table(streams), *describe_gains(streams), LEGEND]
        blocks += [class_report.build_method_table(figures, f"{run}, {figures['set']}") for run, _, figures in classes]
        blocks += [class_report.LEGEND] if classes else []
        data = {
            "schema": 2,
            "streams": list(map(result_to_json, streams)),
            "classes": [{"run": run, "seed": seed, **figures} for run, seed, figures in classes],
        }
        return EvalReport(blocks, data)

    def build_sections(self, results: Results, paths: Sequence[str]) -> list[PageSection]:
        classes = [class_report.build_section(*result) for result in iter_class_results(results)]
        return [*stream_report.build_sections(results["streams"], paths), *classes]


def iter_class_results(results: Results) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    for result in results["class_incremental"]:
        for seed, figures in zip(result.seeds, result.figures, strict=True):
            yield result.run, seed, figures
