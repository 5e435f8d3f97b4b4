"""Runs that read, on files of questions about contexts (E4) or of labelled texts (E3): asked, kept, said."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from laconic.config.load import load_recipe
from laconic.console import progress
from laconic.errors import InputError, PreemptedError, UsageError
from laconic.evaluation import line_store as results_store
from laconic.evaluation import runs as reasoning_run
from laconic.evaluation.compression.context_qa import ContextTaskResult
from laconic.evaluation.compression.context_qa_data import load_context_questions
from laconic.evaluation.compression.context_qa_run import ContextQA, ICLClassification, split_demonstrations
from laconic.evaluation.compression.icl_data import load_labelled_texts
from laconic.evaluation.run_names import seed_run_name
from laconic.experiment.compressor import as_compressor
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun
from laconic.storage import lock
from laconic.storage.strict_json import to_canonical_json
from laconic.training.signals import SignalInterruptError, StopSignal

FileKind = Literal["answers", "labels"]
DEFAULT_LABEL_ROWS = 100  # rows that are given a label, of validation and of test
ROW_FILE_SUFFIXES = (".jsonl", ".parquet")
HELD_OUT_SETS = ("test", "valid", "excerpt")  # sets that a recipe itself holds out
QUERY_AWARE_SUFFIX = "-query-aware"
RESULT_FOLDER = re.compile(
    rf"(?P<file>.+)-(?P<kind>answers|labels)-step-(?P<step>\d+)(?P<aware>{QUERY_AWARE_SUFFIX})?(-first-(?P<rows>\d+))?"
)


def is_row_file(name: str) -> bool:
    """Whether a set is a file of rows."""
    return name.endswith(ROW_FILE_SUFFIXES)


def evaluate_files(
    paths: Mapping[str, str],
    files: Sequence[str],
    limit: int | None,
    query_aware: bool,
    stop: StopSignal,
    load_run: Callable[..., LoadedRun],
) -> list[ContextTaskResult]:
    """Every run on every file, the lines of its seeds side by side; `paths` are titles of runs by their paths."""
    found: list[ContextTaskResult] = []
    for path, title in paths.items():
        seeds, lines = list[int](), dict[str, list[list[str]]]()
        for folder in reasoning_run.seed_runs(path):
            run = load_run(folder)
            if run.recipe.method == "lm":
                raise UsageError(f"{folder}: a plain model has no memory to be asked; give runs of autocompressor")
            seeds.append(run.recipe.seed)
            with lock.lock_folder(folder / reasoning_run.EVALUATIONS_FOLDER):
                for file in files:
                    said = evaluate_file(run, seed_run_name(title, path, folder), Path(file), limit, query_aware, stop)
                    lines.setdefault(file, []).append(said)
        for file, each in lines.items():
            kind = detect_kind(Path(file))
            found.append(
                ContextTaskResult(title, Path(file).stem, kind, query_aware and kind == "answers", tuple(seeds), each)
            )
    return found


def evaluate_file(
    run: LoadedRun, name: str, file: Path, limit: int | None, query_aware: bool, stop: StopSignal
) -> list[str]:
    """The lines of a run on a file. Raises `Preempted` (75) after a signal: what is asked is kept."""
    if not file.is_file():
        raise InputError(f"--tasks {file}: no such file; give one of rows, or {', '.join(HELD_OUT_SETS)}")
    reader, kind = as_compressor(run), detect_kind(file)
    if kind == "answers":
        questions = load_context_questions(file)[:limit]
        work, count, batch = ContextQA(reader, questions, query_aware), len(questions), 1
    else:
        work, batch = (
            ICLClassification(reader, *split_demonstrations(load_labelled_texts(file), limit or DEFAULT_LABEL_ROWS)),
            8,
        )
        count = len(work.items)
    extra = (QUERY_AWARE_SUFFIX if query_aware and kind == "answers" else "") + (
        "" if limit is None else f"-first-{limit}"
    )
    folder = run.folder / reasoning_run.EVALUATIONS_FOLDER / f"{file.stem}-{kind}-step-{run.step}{extra}"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    key = {
        "step": reasoning_run.step_hash(run.folder, run.step),
        "file": digest,
        "rows": str(limit),
        "aware": str(query_aware),
    }

    def figures(lines: Sequence[str]) -> Mapping[str, Any]:
        return {
            "schema": 1,
            **ContextTaskResult(name, file.stem, kind, query_aware, (run.recipe.seed,), [lines]).to_json(),
        }

    try:
        with (
            progress(f"{name} {file.name}") as show,
            reasoning_run.flush_denormals(reader.decoder.token_embedding.weight.device),
            stop.interruptible(),
        ):
            return results_store.run_resumable(
                folder, to_canonical_json(key), count, work.run_items, batch_size=batch, summarize=figures, progress=show,
                extra_files={RECIPE_FILE: (run.folder / RECIPE_FILE).read_text(encoding="utf-8")},
            )  # fmt: skip
    except SignalInterruptError:
        rest = "what is asked is kept; the same command goes on"
        raise PreemptedError(f"{stop.signal_name}: {run.folder}, {file.name}: {rest}") from None


def detect_kind(file: Path) -> FileKind:
    """What the rows of a file are, by the first one: questions about contexts, or labelled texts."""
    if file.suffix == ".parquet":
        from laconic.data.parquet_and_hub import read_parquet

        first = set(next(iter(read_parquet(file).rows)))
    else:
        with file.open(encoding="utf-8") as stream:
            first = {field for field in ("context", "text") if f'"{field}"' in stream.readline()}
    return "answers" if "context" in first else "labels"


def load_file_results(paths: Mapping[str, str]) -> list[ContextTaskResult]:
    """What the evaluations of runs hold of files, of each the newest step's, and of those the most rows.

    Raises `BadInput` (66) for seeds that were asked other rows.
    """
    found: list[ContextTaskResult] = []
    for path, title in paths.items():
        folders = reasoning_run.seed_runs(path)
        by_seed = [find_latest(folder / reasoning_run.EVALUATIONS_FOLDER) for folder in folders]
        for (file, kind, aware), _ in sorted(by_seed[0].items()):
            places = [(folder, there[(file, kind, aware)]) for folder, there in zip(folders, by_seed, strict=True)
                      if (file, kind, aware) in there]  # fmt: skip
            keys = {
                json.loads((place / results_store.KEY_FILE).read_text(encoding="utf-8"))["file"] for _, place in places
            }
            lines = [results_store.read_lines(place) for _, place in places]
            if len(keys) > 1 or len({len(each) for each in lines}) > 1:
                raise InputError(f"{path}: its seeds were asked other rows of {file}; evaluate them in one command")
            recipes = [load_recipe(folder / RECIPE_FILE)[0] for folder, _ in places]
            seeds = tuple(recipe.seed for recipe in recipes)
            found.append(
                ContextTaskResult(title, file, cast(FileKind, kind), aware, seeds, lines, recipes[0].table_row)
            )
    return sorted(found, key=lambda each: (each.kind, each.file, each.query_aware))


def find_latest(folder: Path) -> dict[tuple[str, str, bool], Path]:
    """Of each file, kind and order of reading the folder of its newest step with the most rows."""
    found: dict[tuple[str, str, bool], tuple[tuple[int, float], Path]] = {}
    for each in sorted(folder.glob("*-step-*")):
        said = RESULT_FOLDER.fullmatch(each.name)
        if said is None or each.name.startswith("."):
            continue
        key = (said["file"], said["kind"], said["aware"] is not None)
        rank = (int(said["step"]), float(said["rows"] or "inf"))
        if key not in found or rank > found[key][0]:
            found[key] = (rank, each)
    return {key: place for key, (_, place) in found.items()}


def format_result(result: ContextTaskResult) -> list[str]:
    """A finding in lines."""
    head = f"{result.run}, {result.file}: {result.num_items} rows"
    if result.kind == "answers":
        head += ", the question stood before the context" if result.query_aware else ""
        return [head, *(
            f"  {w.condition:<12}{w.context_size:7.1f} before  "
            + "  ".join(f"{name} {100 * x.mean.mean:.1f} ± {100 * x.se:.1f} %" for name, x in w.metrics.items())
            for w in result.condition_scores
        )]  # fmt: skip
    lines = [f"{head} of {result.num_labels} labels; majority floor {100 * result.majority_accuracy:.1f} %"]
    for w in result.icl_scores:
        spread = "" if w.std is None else f" ± {100 * w.std:.1f}"
        how = ", ".join(dict.fromkeys(w.variants))
        lines.append(
            f"  {w.condition:<26}{w.context_size:7.1f} before  {100 * w.accuracy:.1f}{spread} % right ({how}, by validation)"
        )
    return lines
