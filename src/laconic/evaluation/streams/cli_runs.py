"""Runs that learn while they read, and plain ones beside them, on streams: for `laconic evaluate` and its report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.console import log_message, progress
from laconic.errors import InputError, PreemptedError, UsageError
from laconic.evaluation import line_store as results_store
from laconic.evaluation import results_store as eval_store
from laconic.evaluation import runs as reasoning_run
from laconic.evaluation.class_incremental import report as class_incremental_report
from laconic.evaluation.class_incremental.intent_data import INTENT_DATASETS
from laconic.evaluation.class_incremental.run import plan_class_incremental
from laconic.evaluation.reasoning.question_sets import folder_safe_name
from laconic.evaluation.run_names import seed_run_name, short_run_names
from laconic.evaluation.runs import EvalRequest
from laconic.evaluation.streams import books
from laconic.evaluation.streams import report as streams_report
from laconic.evaluation.streams import run as streams_run
from laconic.evaluation.streams import table as streams_table
from laconic.evaluation.streams import tasks as streams_tasks
from laconic.evaluation.streams.evaluate import StreamRecord, parse_stream_record
from laconic.evaluation.streams.table import StreamResult
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun
from laconic.storage import lock
from laconic.training.signals import SignalInterruptError

NESTED_METHOD = "hope"
KNOWN_SETS = (*streams_run.RECIPE_SPLITS, *streams_run.STREAM_NAMES, *INTENT_DATASETS)
FOLDER_MARK = "-stream-"  # stands in the name of a folder of evaluations between the set's name and the step
BASELINE_CONDITIONS = {"books": books.FRESH, "levels": "all levels"}  # and the way that others are compared with


class ClassIncrementalRun(NamedTuple):
    """Figures of a run on a set of classes, as `recipe.incremental` gives them."""

    run: str
    seed: int
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class StreamResults:
    """All that was measured: streams, and sets of classes."""

    streams: Sequence[StreamResult]
    classes: Sequence[ClassIncrementalRun]

    @property
    def has_results(self) -> bool:
        """Whether there is anything."""
        return bool(self.streams or self.classes)


def should_run_streams(runs: Sequence[str], datasets: Sequence[str]) -> bool:
    """Whether streams are asked for: of a run of method hope, or by a name that only they have."""
    recipes = [load_recipe(folder / RECIPE_FILE)[0] for path in runs for folder in reasoning_run.seed_runs(path)]
    only = set(datasets) & {*streams_run.STREAM_NAMES, *INTENT_DATASETS}
    return any(recipe.method == NESTED_METHOD for recipe in recipes) or bool(
        only and all(map(is_language_model, recipes))
    )


def is_language_model(recipe: Recipe) -> bool:
    """Whether a run is a language model that streams may ask."""
    return recipe.method in (NESTED_METHOD, "lm")


def run_evaluations(request: EvalRequest, root: str | None, shots: int | None) -> StreamResults:
    """Every run on every set; of a class so many examples are learned. Raises `Usage` (2) for a name that is none, and
    for a run of another method.
    """
    odd = next((name for name in request.tasks if name not in KNOWN_SETS), None)
    if odd is not None:
        raise UsageError(f"--tasks {odd}: of runs that learn while they read the sets are {', '.join(KNOWN_SETS)}")
    measured, classes = list[StreamResult](), list[ClassIncrementalRun]()
    for path, title in zip(request.runs, short_run_names(request.runs), strict=True):
        seeds, rows = list[int](), dict[tuple[str, str], list[Sequence[StreamRecord]]]()
        about: dict[str, Any] = {}
        for folder in reasoning_run.seed_runs(path):
            run = request.load_run(folder)
            if not is_language_model(run.recipe):
                raise UsageError(
                    f"{folder}: method {run.recipe.method} is no language model of streams; evaluate it alone"
                )
            seeds.append(run.recipe.seed)
            about = describe_recipe(run.recipe)
            with lock.lock_folder(folder / reasoning_run.EVALUATIONS_FOLDER):
                for name in request.tasks:
                    if name in INTENT_DATASETS:
                        classes.append(
                            ClassIncrementalRun(
                                title, run.recipe.seed, evaluate_classes(request, run, title, name, root, shots)
                            )
                        )
                        continue
                    for each in streams_run.build_requests(run, name, request.limit):
                        got = evaluate_on_stream(request, run, each, seed_run_name(title, path, folder))
                        rows.setdefault((each.name, name if name in BASELINE_CONDITIONS else each.stream), []).append(
                            got
                        )
        measured += [
            StreamResult(format_stream_name(*key), title, tuple(seeds), found, about) for key, found in rows.items()
        ]
    order = list(dict.fromkeys(line.stream for line in measured))
    return StreamResults(sorted(measured, key=lambda line: order.index(line.stream)), classes)


def format_stream_name(name: str, stream: str) -> str:
    """What a line is called: the stream, and the set where that is another."""
    return stream if name == stream else f"{stream} ({name})"


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """What a run is, as far as its figures depend on it."""
    memory, levels, learning = recipe.mixer, recipe.cms, recipe.inner_loop
    found: dict[str, Any] = {"method": recipe.method, "kind": recipe.data.source, "row": recipe.table_row}
    if recipe.method != NESTED_METHOD:
        return found
    return found | {
        "mixer": None if memory is None else memory.kind,
        "chunks": None if levels is None else list(levels.chunk_sizes),
        "learn": learning is None or learning.enabled,
    }


def evaluate_on_stream(
    request: EvalRequest, run: LoadedRun, stream: streams_run.StreamRequest, name: str
) -> list[StreamRecord]:
    """A run on a stream. Raises `Preempted` (75) after a signal: what is read is kept."""
    folder = run.folder / reasoning_run.EVALUATIONS_FOLDER / results_folder_name(stream.name, run.step, request.limit)
    more: dict[str, Any] = {
        "folder": folder,
        "key": {"step": reasoning_run.step_hash(run.folder, run.step), "rows": str(request.limit)},
        "texts": {RECIPE_FILE: (run.folder / RECIPE_FILE).read_text(encoding="utf-8")},
    }
    try:
        with (
            progress(f"{name} {stream.name}") as show,
            reasoning_run.flush_denormals(request.device),
            request.stop.interruptible(),
        ):
            more["show"] = show
            if stream.name == "books":
                model = streams_run.stateful_model(run)
                return books.evaluate_books(
                    model, stream.source, request.device, bytes_per_token=stream.bytes_per_token, **more
                )
            if stream.name == "levels":
                return books.evaluate_levels(
                    streams_run.ablated_models(run),
                    stream.source,
                    request.device,
                    bytes_per_token=stream.bytes_per_token,
                    **more,
                )
            return streams_tasks.evaluate_stream(
                streams_run.stateful_model(run), stream.stream, stream.source, request.device, batch_size=stream.batch_size,
                bytes_per_token=stream.bytes_per_token, **more,
            )  # fmt: skip
    except SignalInterruptError:
        rest = "what is read is kept; run the same command again to go on"
        raise PreemptedError(f"{request.stop.signal_name}: {run.folder}, {stream.name}: {rest}") from None


def evaluate_classes(
    request: EvalRequest,
    run: LoadedRun,
    title: str,
    name: str,
    root: str | None,
    shots: int | None,
) -> dict[str, Any]:
    """Run class-incremental learning on a data set.

    Raises:
        PreemptedError: After a signal; finished pairs of method and order are stored.
    """
    path = root or (run.recipe.data.data_dir and str(run.recipe.data.data_dir))
    plan = plan_class_incremental(
        run.parts.decoder, run.parts.tokenizer, name, path, max_test_per_class=request.limit, max_train_per_class=shots
    )
    metadata = reasoning_run.describe_evaluation(run, "class_incremental", name, limit=request.limit, shots=shots)
    log = partial(log_unit, title)
    try:
        with (
            progress(f"{title} {name}, methods and orders") as show,
            reasoning_run.flush_denormals(request.device),
            request.stop.interruptible(),
        ):
            records = eval_store.run_resumable(
                run.folder / reasoning_run.EVALUATIONS_FOLDER,
                metadata,
                len(plan),
                lambda units: plan.run_units(units, metadata, log),
                batch_size=1,
                summarize=plan.summarise,
                extra_files=reasoning_run.copy_recipe(run),
                progress=show,
            )
    except SignalInterruptError:
        hint = "finished units are stored; run the same command again to continue"
        raise PreemptedError(f"{request.stop.signal_name}: {run.folder}, {name}: {hint}") from None
    return plan.summarise(records)


def log_unit(title: str, text: str) -> None:
    """Log a message of a run."""
    log_message(f"{title}: {text}")


def load_class_results(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the class-incremental results in a run's `evaluations` folder: of each set the latest and largest."""
    stored = eval_store.latest_evaluations(folder, "class_incremental").values()
    return {evaluation.metadata.task: evaluation.figures for evaluation in stored}


def results_folder_name(name: str, step: int, limit: int | None, shots: int | None = None) -> str:
    """Where in evaluations/ the rows lie."""
    learned = "" if shots is None else f"-learned-{shots}"
    return f"{folder_safe_name(name)}{FOLDER_MARK}step-{step}" + ("" if limit is None else f"-first-{limit}") + learned


def print_results(results: StreamResults, as_json: bool) -> None:
    """The figures on standard output."""
    if as_json:
        print(json.dumps(results_to_json(results), ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    wide = Console(highlight=False)
    wide = wide if wide.is_terminal else Console(highlight=False, width=240)
    if results.streams:
        wide.print(streams_table.build_stream_table(results.streams))
        print("\n".join([*describe_gains(results.streams), streams_table.LEGEND]))
    for each in results.classes:
        header, *rows = class_incremental_report.build_table(each.figures)
        made = Table(*header, box=None, pad_edge=False, header_style="", title=f"{each.run}, {each.figures['set']}")
        for row in rows:
            made.add_row(*row)
        wide.print(made)
    if results.classes:
        print(class_incremental_report.LEGEND)


def results_to_json(results: StreamResults) -> dict[str, Any]:
    """As JSON has it."""
    lines = [
        streams_table.result_to_json(line) | {"gains": [gain_to_json(x) for x in compute_gains(line)]}
        for line in results.streams
    ]
    classes = [{"run": each.run, "seed": each.seed, **each.figures} for each in results.classes]
    return {"schema": 1, "streams": lines, "classes": classes}


def compute_gains(result: StreamResult) -> list[books.PairedGain]:
    """What ways save against the one they are compared with: the fresh state, all levels, learning anew every time."""
    against = {"books": "fresh", "levels": "all levels"}.get(result.stream)
    if against is None:
        against = next((way for way in ("learn, reset", "still") if way in result.conditions), None)
    if against is None or not (result.stream in BASELINE_CONDITIONS or result.stream.startswith("ppl")):
        return []
    return books.compute_paired_gains(result.records, against)


def gain_to_json(gain: books.PairedGain) -> dict[str, Any]:
    """As JSON has it, which has no word for the error of a single item."""
    return gain._asdict() | {"se": gain.standard_error if gain.num_items > 1 else None}


def describe_gains(results: Sequence[StreamResult]) -> list[str]:
    """Differences in nats, paired, in lines."""
    found: list[str] = []
    for line in results:
        each = compute_gains(line)
        loses = line.stream == "levels"
        found += [
            f"{line.run}, {line.stream}: {x.condition} {'loses' if loses else 'saves'} "
            f"{-x.nats_saved if loses else x.nats_saved:+.4f} nats a token against {x.baseline}"
            + (f" ± {x.standard_error:.4f} over {x.num_items} items" if x.num_items > 1 else " on one item")
            for x in each
        ]
        if (share := books.retained_share(each)) is not None:
            found.append(f"{line.run}, {line.stream}: after another book {100 * share:.0f} % of that is left")
    return found


def kept_found(paths: Sequence[str]) -> StreamResults:
    """What the evaluations of runs hold, of each stream the newest step's with the most rows."""
    measured, classes = list[StreamResult](), list[ClassIncrementalRun]()
    for path, title in zip(paths, short_run_names(paths), strict=True):
        folders = reasoning_run.seed_runs(path)
        recipes = [load_recipe(folder / RECIPE_FILE)[0] for folder in folders]
        for folder, recipe in zip(folders, recipes, strict=True):
            by_name = load_class_results(folder / reasoning_run.EVALUATIONS_FOLDER)
            classes += [ClassIncrementalRun(title, recipe.seed, figures) for figures in by_name.values()]
        by_seed = [newest_results(folder / reasoning_run.EVALUATIONS_FOLDER) for folder in folders]
        for name in by_seed[0]:
            places = [there[name] for there in by_seed if name in there]
            seeds = [r.seed for r, there in zip(recipes, by_seed, strict=True) if name in there]
            lines = [results_store.read_lines(place) for place in places]
            read_rows = books.parse_book_line if name == "books" else lambda line: [parse_stream_record(line)]
            rows = [[row for line in each for row in read_rows(line)] for each in lines]
            if len({tuple(row.id for row in each) for each in rows}) > 1:
                raise InputError(f"{path}: its seeds read other items of {name}; evaluate them in one command")
            stream = format_stream_name(name, infer_stream(name, recipes[0]))
            measured.append(StreamResult(stream, title, tuple(seeds), rows, describe_recipe(recipes[0])))
    return StreamResults(sorted(measured, key=lambda line: line.stream), classes)


def infer_stream(name: str, recipe: Recipe) -> str:
    """The stream of a kept set."""
    if name in streams_run.STREAM_NAMES:
        return name
    return {"text": "ppl"}.get(recipe.data.source, recipe.data.source)


def newest_results(folder: Path) -> dict[str, Path]:
    """Of each set the folder of its newest step with the most rows, and of those with the most that was learned."""
    found: dict[str, tuple[tuple[int, float, float], Path]] = {}
    for each in sorted(folder.glob(f"*{FOLDER_MARK}step-*")):
        name, _, rest = each.name.partition(f"{FOLDER_MARK}step-")
        step, *limits = rest.split("-")
        said = dict(zip(limits[::2], map(float, limits[1::2]), strict=True))
        rank = (int(step), said.get("first", inf), said.get("learned", inf))
        if not each.name.startswith(".") and (name not in found or rank > found[name][0]):
            found[name] = (rank, each)
    return {name: place for name, (_, place) in found.items()}


def render_page(paths: Sequence[str], results: StreamResults) -> str:
    """The page of a report."""
    courses = [(seed_run_name(title, path, folder), load_metric_series(folder)) for path, title in zip(paths, short_run_names(paths), strict=True)
               for folder in reasoning_run.seed_runs(path)]  # fmt: skip
    classes = [(f"{each.run}, seed {each.seed}", each.figures) for each in results.classes]
    said = {line.run: {**line.run_info, "seeds": ", ".join(map(str, line.seeds))} for line in results.streams}
    facts = [(run, ", ".join(f"{k} {v}" for k, v in about.items() if v is not None)) for run, about in said.items()]
    return streams_report.render_stream_page(results.streams, describe_gains(results.streams), classes, courses, facts)


def load_metric_series(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """What the metrics of a run say of its levels and memories, step by step."""
    found: dict[str, list[tuple[float, float]]] = {}
    file = folder / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        row = json.loads(line)
        for name in (name for name in row if streams_report.is_plotted_metric(name) and isinstance(row[name], float)):
            found.setdefault(name, []).append((float(row["step"]), row[name]))
    return found
