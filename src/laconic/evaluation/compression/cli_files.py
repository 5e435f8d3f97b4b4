"""Evaluate compressors on files of context questions or labelled texts, and load stored results."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import cast

from laconic.console import progress
from laconic.data.parquet_and_hub import read_parquet
from laconic.errors import InputError, UsageError
from laconic.evaluation import runs
from laconic.evaluation.compression.context_qa import ContextTaskResult, Item, TaskKind, group_items
from laconic.evaluation.compression.context_qa_data import load_context_questions
from laconic.evaluation.compression.context_qa_run import ContextQA, ICLClassification, split_demonstrations
from laconic.evaluation.compression.icl_data import load_labelled_texts
from laconic.evaluation.results_store import EVALUATIONS_FOLDER, EvalRecord, run_resumable
from laconic.evaluation.run_names import seed_run_name, short_run_names
from laconic.evaluation.runs import EvalRequest, load_stored_tasks, seed_runs
from laconic.experiment.compressor import as_compressor
from laconic.experiment.load_run import LoadedRun
from laconic.storage import lock

DEFAULT_LABEL_ROWS = 100  # texts to label, for validation and for testing each
ROW_FILE_SUFFIXES = (".jsonl", ".parquet")


def is_row_file(name: str) -> bool:
    """Test whether a task is a file of rows."""
    return name.endswith(ROW_FILE_SUFFIXES)


def evaluate_files(request: EvalRequest, query_aware: bool) -> list[ContextTaskResult]:
    """Evaluate every run on every file of the request.

    Args:
        request: Runs and tasks; tasks that are no files are skipped.
        query_aware: Whether a question precedes its context in the compression.

    Raises:
        UsageError: If a run has no memory.
        PreemptedError: After a signal; finished items are stored.
    """
    files = [name for name in request.tasks if is_row_file(name)]
    results: list[ContextTaskResult] = []
    for path, title in zip(request.runs, short_run_names(request.runs), strict=True) if files else ():
        seeds, items = list[int](), dict[str, list[list[Item]]]()
        for folder in seed_runs(path):
            run = request.load_run(folder)
            if run.recipe.method == "lm":
                raise UsageError(f"{folder}: a language model has no memory; give runs with method autocompressor")
            seeds.append(run.recipe.seed)
            with lock.lock_folder(folder / EVALUATIONS_FOLDER):
                for file in files:
                    name = seed_run_name(title, path, folder)
                    items.setdefault(file, []).append(evaluate_file(request, run, name, Path(file), query_aware))
        for file, by_seed in items.items():
            kind = detect_kind(Path(file))
            is_aware = query_aware and kind == "answers"
            results.append(ContextTaskResult(title, Path(file).stem, kind, is_aware, tuple(seeds), by_seed))
    return results


def evaluate_file(request: EvalRequest, run: LoadedRun, name: str, file: Path, query_aware: bool) -> list[Item]:
    """Evaluate a run on a file, or load its stored results."""
    if not file.is_file():
        raise InputError(f"--tasks {file}: no such file; give a file of rows, or a held-out set such as test")
    compressor, kind = as_compressor(run), detect_kind(file)
    variant = {"kind": kind}
    if kind == "answers":
        questions = load_context_questions(file)[: request.limit]
        job = ContextQA(compressor, questions, query_aware)
        num_items, batch_size, order = len(questions), 1, job.order
        if query_aware:
            variant["compression"] = "query-aware"
    else:
        rows = load_labelled_texts(file)
        job = ICLClassification(compressor, *split_demonstrations(rows, request.limit or DEFAULT_LABEL_ROWS))
        num_items, batch_size, order = len(job.items), 8, None
    key = {"data": sha256(file.read_bytes()).hexdigest()}
    metadata = runs.describe_evaluation(run, "context_qa", file.stem, limit=request.limit, variant=variant, key=key)

    def evaluate(indices: Sequence[int]) -> list[list[EvalRecord]]:
        return [item.to_records(metadata) for item in job.run_items(indices)]

    def summarize(records: Sequence[EvalRecord]) -> dict[str, object]:
        return to_result(name, file.stem, variant, (run.recipe.seed,), [records]).to_json()

    label = f"{name} {file.name}"
    with progress(label) as show, runs.interruptible_evaluation(request.stop, request.device, label):
        records = run_resumable(
            run.folder / EVALUATIONS_FOLDER,
            metadata,
            num_items,
            evaluate,
            batch_size=batch_size,
            order=order,
            summarize=summarize,
            extra_files=runs.copy_recipe(run),
            progress=show,
        )
    return group_items(records)


def to_result(
    run: str,
    file: str,
    variant: dict[str, str],
    seeds: tuple[int, ...],
    records: Sequence[Sequence[EvalRecord]],
    paper_row: str | None = None,
) -> ContextTaskResult:
    """Build a result from stored records."""
    kind, is_aware = cast(TaskKind, variant["kind"]), "compression" in variant
    return ContextTaskResult(
        run, file, kind, is_aware, seeds, [group_items(seed_records) for seed_records in records], paper_row
    )


def detect_kind(file: Path) -> TaskKind:
    """Detect from the first row whether a file has context questions or labelled texts."""
    if file.suffix == ".parquet":
        fields = set(next(iter(read_parquet(file).rows)))
    else:
        with file.open(encoding="utf-8") as stream:
            line = stream.readline()
        fields = {field for field in ("context", "text") if f'"{field}"' in line}
    return "answers" if "context" in fields else "labels"


def load_file_results(paths: Sequence[str]) -> list[ContextTaskResult]:
    """Load the stored results of runs: of each file the latest step with the most items.

    Raises:
        InputError: If the seeds of a run were evaluated on different items.
    """
    results = [
        to_result(
            stored.title, stored.task, dict(stored.variant), stored.seeds, stored.records, stored.recipe.table_row
        )
        for stored in load_stored_tasks(paths, "context_qa")
    ]
    return sorted(results, key=lambda result: (result.kind, result.file, result.query_aware))


def format_result(result: ContextTaskResult) -> list[str]:
    """Format a result as lines of text."""
    head = f"{result.run}, {result.file}: {result.num_items} items"
    if result.kind == "answers":
        lines = [head + (", the question preceded the context" if result.query_aware else "")]
        for score in result.condition_scores:
            metrics = "  ".join(
                f"{name} {100 * x.mean.mean:.1f} ± {100 * x.se:.1f} %" for name, x in score.metrics.items()
            )
            lines.append(f"  {score.condition:<12}{score.context_size:7.1f} before  {metrics}")
        return lines
    lines = [f"{head} of {result.num_labels} labels; majority baseline {100 * result.majority_accuracy:.1f} %"]
    for score in result.icl_scores:
        std = "" if score.std is None else f" ± {100 * score.std:.1f}"
        variants = ", ".join(dict.fromkeys(score.variants))
        accuracy = f"{100 * score.accuracy:.1f}{std} % correct ({variants}, chosen on validation)"
        lines.append(f"  {score.condition:<26}{score.context_size:7.1f} before  {accuracy}")
    return lines
