"""Context compression: held-out documents after vectors or text, and files of questions or labels about contexts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from laconic.config.recipe import DOCUMENT_METHODS, SEGMENTED_SOURCES, Recipe
from laconic.data.strict_jsonl import read_rows
from laconic.errors import InputError, UsageError
from laconic.evaluation.compression import context_qa, demonstrations, report
from laconic.evaluation.compression.run import EXCERPT, build_document_jobs, collect_recipe_info
from laconic.evaluation.example_answers import build_examples_table, format_examples
from laconic.evaluation.report.page import PageSection
from laconic.evaluation.results_store import EvalJob, EvalKind
from laconic.evaluation.suite import EvalReport, EvalRequest, Results, RunResult, describe_evaluation
from laconic.evaluation.tables import Table, figures_to_json
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.text_models.compressor import as_compressor

HELD_OUT_SETS = ("test", "valid", EXCERPT)
ROW_FILE_SUFFIXES = (".jsonl", ".parquet")
FILE_TITLES = {"answers": "Context question answering", "labels": "In-context classification"}  # by kind of rows


class CompressionSuite:
    """Runs that read documents, on documents that their recipes hold out and on files."""

    kinds: Sequence[EvalKind] = ("compression", "context_qa")
    users = "runs that read documents"
    options: Collection[str] = ()

    def accepts(self, recipes: Collection[Recipe], tasks: Collection[str]) -> bool:
        return all(recipe.method in DOCUMENT_METHODS for recipe in recipes)

    def check(self, request: EvalRequest, recipes: Mapping[Path, Recipe]) -> None:
        files = [name for name in request.tasks if name.endswith(ROW_FILE_SUFFIXES)]
        for name in request.tasks:
            if name not in (*HELD_OUT_SETS, *files):
                has_lm = any(recipe.method == "lm" for recipe in recipes.values())
                known = (*HELD_OUT_SETS, *([] if has_lm else ["files of rows"]))
                raise UsageError(f"--tasks {name}: runs that read documents have {', '.join(known)}")
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
        documents = sorted(results["compression"], key=order_document_set)
        files = results["context_qa"]
        blocks = [block for result in files for block in list_file_blocks(result)]
        if documents:
            blocks += [report.build_gain_table(documents), report.LEGEND, *report.format_recall(documents)]
        data = {
            "schema": 1,
            "results": list(map(report.result_to_json, documents)),
            "files": list(map(file_to_json, files)),
        }
        return EvalReport(blocks, data)

    def build_sections(self, results: Results, paths: Sequence[str]) -> list[PageSection]:
        files = sorted(results["context_qa"], key=lambda result: (result.variant["kind"], result.task))
        documents = sorted(results["compression"], key=order_document_set)
        return report.build_sections(documents, list(map(build_file_section, files)))


def order_document_set(result: RunResult) -> tuple[bool, str, int]:
    """Return what sorts results: by split, excerpts last, and by the length of the context at the end of the name."""
    split, _, length = result.task.rpartition("-")
    return (EXCERPT in split, split, int(length)) if length.isdecimal() else (False, result.task, 0)


def build_file_job(request: EvalRequest, run: LoadedRun, file: Path) -> EvalJob:
    if not file.is_file():
        raise InputError(f"--tasks {file}: no such file; give a file of rows, or a held-out set such as test")
    kind = detect_kind(file)
    key = {"data": sha256(file.read_bytes()).hexdigest()}
    options: dict[str, Any] = {"limit": request.limit, "variant": {"kind": kind}, "key": key, "suffix": file.suffix}
    metadata = describe_evaluation(run, "context_qa", file.stem, **options)
    build_job = context_qa.build_question_job if kind == "answers" else demonstrations.build_label_job
    return build_job(as_compressor(run), file, metadata)


def detect_kind(file: Path) -> str:
    """Detect from the first row whether a file has context questions ("answers") or labelled texts ("labels")."""
    return read_rows(file, lambda row, name: "answers" if "context" in row else "labels", is_last=bool)[0]


def file_to_json(result: RunResult) -> dict[str, Any]:
    kind = result.variant["kind"]
    module = context_qa if kind == "answers" else demonstrations
    data = {"run": result.run, "file": result.task, "kind": kind, "seeds": result.seeds, **module.count_items(result)}
    return figures_to_json(data | {"conditions": module.score_conditions(result)})


def list_file_blocks(result: RunResult) -> list[Table | str]:
    """Return what a terminal shows of a file: the table, its legend, and the first answers."""
    if result.variant["kind"] == "labels":
        return [demonstrations.build_score_table(result), demonstrations.LEGEND]
    examples = format_examples(context_qa.list_examples(result))
    return [context_qa.build_score_table(result), context_qa.LEGEND, *examples]


def build_file_section(result: RunResult) -> PageSection:
    kind = result.variant["kind"]
    blocks = list_file_blocks(result)[:2]
    examples = [build_examples_table(context_qa.list_examples(result))] if kind == "answers" else []
    return PageSection(f"{FILE_TITLES[kind]}: {result.task}", [*blocks, *examples])
