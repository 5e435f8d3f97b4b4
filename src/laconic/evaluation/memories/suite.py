"""The task `memories`: plain checkpoints and AutoCompressors, and the plain baselines, on the same documents."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.config.recipe import Recipe
from laconic.errors import UsageError
from laconic.evaluation.checkpoints import read_prompt
from laconic.evaluation.memories.contexts import KV_METHODS
from laconic.evaluation.memories.evaluate import TASK, build_memory_jobs
from laconic.evaluation.memories.report import (
    LEGEND,
    build_comparison_table,
    compare_results,
    plot_comparison,
)
from laconic.evaluation.report.page import PageSection
from laconic.evaluation.results_store import EvalJob, EvalKind
from laconic.evaluation.suite import EvalReport, EvalRequest, Results
from laconic.evaluation.tables import Table, figures_to_json
from laconic.experiment.load_run import LoadedRun


class MemorySuite:
    """Memories of documents: what they keep of the full text's gain, and how large they are."""

    kinds: Sequence[EvalKind] = ("memories",)
    options: Collection[str] = ("documents", "questions", "methods", "keep", "tokens", "fit")

    def accepts(self, recipes: Collection[Recipe], tasks: Collection[str]) -> bool:
        return TASK in tasks

    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None:
        """Raise `UsageError` for other tasks or options, for runs without memories, or without documents."""
        prompts = {folder: read_prompt(folder) for folder in recipes}
        if len(request.tasks) > 1:
            raise UsageError(f"--tasks {','.join(request.tasks)}: evaluate {TASK} by itself")
        if request.documents is None and request.questions is None:
            raise UsageError(f"--tasks {TASK}: pass --documents FILE.jsonl, --questions FILE.jsonl, or both")
        for folder, recipe in recipes.items():
            prompt = prompts[folder]
            if prompt is None and recipe.method != "autocompressor":
                raise UsageError(
                    f"{folder}: method {recipe.method} writes no memory; give a model or an autocompressor"
                )
            if prompt is not None and prompt.style != "plain":
                raise UsageError(f"{folder}: {TASK} are asked as plain text; pass --prompt plain")
        if (request.methods or request.fit is not None) and not any(prompts.values()):
            raise UsageError("--methods, --fit: only for models; an autocompressor writes summary vectors")
        unknown = next((name for name in request.methods if name not in KV_METHODS), None)
        if unknown is not None:
            raise UsageError(f"--methods {unknown}: choose from {', '.join(KV_METHODS)}")

    def describe(self, recipe: Recipe) -> dict[str, Any]:
        return {}

    def build_jobs(self, request: EvalRequest, run: LoadedRun, task: str) -> Iterator[EvalJob]:
        yield from build_memory_jobs(request, run)

    def report(self, request: EvalRequest, results: Results) -> EvalReport:
        comparisons, notes = compare_results(results["memories"]), list_notes(results)
        blocks: list[Table | str] = [build_comparison_table(comparison) for comparison in comparisons]
        data = {"schema": 1, "comparisons": figures_to_json(comparisons), "notes": notes}
        return EvalReport([*blocks, LEGEND, *notes], data)

    def build_sections(self, results: Results, paths: Sequence[str]) -> list[PageSection]:
        sections = [
            PageSection(x.title, [LEGEND, plot_comparison(x), build_comparison_table(x)])
            for x in compare_results(results["memories"])
        ]
        return [*sections, PageSection("Notes on memories", [list_notes(results)])]


def list_notes(results: Results) -> list[str]:
    return list(dict.fromkeys(note for result in results["memories"] for note in result.notes))
