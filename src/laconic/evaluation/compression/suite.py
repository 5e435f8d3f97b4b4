"""Context compression: held-out documents after vectors or text, and files of questions or labels about contexts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.config.recipe import DOCUMENT_METHODS, SEGMENTED_SOURCES, Recipe
from laconic.errors import UsageError
from laconic.evaluation.compression import context_qa_report, table
from laconic.evaluation.compression.context_qa_run import build_file_job
from laconic.evaluation.compression.report import build_sections
from laconic.evaluation.compression.run import EXCERPT, build_document_jobs, collect_recipe_info
from laconic.evaluation.report.page import PageSection
from laconic.evaluation.results_store import EvalJob, EvalKind
from laconic.evaluation.suite import EvalReport, EvalRequest, Results, RunResult
from laconic.evaluation.tables import Table
from laconic.experiment.load_run import LoadedRun

HELD_OUT_SETS = ("test", "valid", EXCERPT)
ROW_FILE_SUFFIXES = (".jsonl", ".parquet")


class CompressionSuite:
    """Runs that read documents, on documents that their recipes hold out and on files."""

    kinds: Sequence[EvalKind] = ("compression", "context_qa")
    options: Collection[str] = ()

    def accepts(self, recipes: Collection[Recipe], tasks: Collection[str]) -> bool:
        return all(recipe.method in DOCUMENT_METHODS for recipe in recipes)

    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None:
        """Raise `UsageError` for an unknown task, a file for a run without memory, or data without segments."""
        files = [name for name in request.tasks if name.endswith(ROW_FILE_SUFFIXES)]
        for name in request.tasks:
            if name not in (*HELD_OUT_SETS, *files):
                raise UsageError(
                    f"--tasks {name}: runs that read documents have {', '.join(HELD_OUT_SETS)}, and files of rows"
                )
        for folder, recipe in recipes.items():
            if files and recipe.method == "lm":
                raise UsageError(f"{folder}: a language model has no memory; give runs with method autocompressor")
            if recipe.data.source not in SEGMENTED_SOURCES:
                raise UsageError(f"{folder}: data.source {recipe.data.source} has no segments; evaluate it by itself")

    def describe(self, recipe: Recipe) -> dict[str, Any]:
        return collect_recipe_info(recipe)

    def build_jobs(self, request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]:
        if task in HELD_OUT_SETS:
            yield from build_document_jobs(request, run, task)
        else:
            yield build_file_job(request, run, Path(task))

    def report(self, request: EvalRequest, results: Results) -> EvalReport:
        documents = table.add_controls(sorted(results["compression"], key=order_document_set))
        blocks: list[Table | str] = [
            block for result in results["context_qa"] for block in context_qa_report.list_blocks(result)
        ]
        if documents:
            blocks += [table.build_gain_table(documents), table.LEGEND, *table.format_recall(documents)]
        data = {
            "schema": 1,
            "results": list(map(table.result_to_json, documents)),
            "files": list(map(context_qa_report.result_to_json, results["context_qa"])),
        }
        return EvalReport(blocks, data)

    def build_sections(self, results: Results, paths: Sequence[str]) -> list[PageSection]:
        documents = sorted(results["compression"], key=order_document_set)
        return build_sections(
            table.add_controls(documents),
            sorted(results["context_qa"], key=lambda result: (result.variant["kind"], result.task)),
        )


def order_document_set(result: RunResult) -> tuple[bool, str, int]:
    """Return what sorts results: by split, excerpts last, and by the length of the context at the end of the name."""
    split, _, length = result.task.rpartition("-")
    return (EXCERPT in split, split, int(length)) if length.isdecimal() else (False, result.task, 0)
