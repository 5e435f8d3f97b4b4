"""Evaluate runs on streams and classes for `laconic evaluate`, and load stored results for `laconic report`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from laconic.config.recipe import Recipe
from laconic.console import log_message, progress
from laconic.errors import UsageError
from laconic.evaluation.class_incremental import report as class_report
from laconic.evaluation.class_incremental.intent_data import INTENT_DATASETS
from laconic.evaluation.class_incremental.run import plan_class_incremental
from laconic.evaluation.report.page import PagePlot, PageSection, PageTable, render_plots, render_table
from laconic.evaluation.results_store import EVALUATIONS_FOLDER, run_resumable
from laconic.evaluation.run_names import seed_run_name, short_run_names
from laconic.evaluation.runs import (
    EvalRequest,
    copy_recipe,
    describe_evaluation,
    interruptible_evaluation,
    load_recipes,
    load_stored_tasks,
    seed_runs,
)
from laconic.evaluation.streams import report as streams_report
from laconic.evaluation.streams.books import (
    FRESH,
    PairedGain,
    compute_paired_gains,
    evaluate_books,
    evaluate_levels,
    retained_share,
)
from laconic.evaluation.streams.evaluate import StreamItem, items_from_records
from laconic.evaluation.streams.report import MetricSeries, is_plotted_metric
from laconic.evaluation.streams.run import (
    RECIPE_SPLITS,
    STREAM_NAMES,
    StreamRequest,
    ablated_models,
    build_requests,
    stateful_model,
)
from laconic.evaluation.streams.table import LEGEND, StreamTaskResult, build_stream_table, result_to_json
from laconic.evaluation.streams.tasks import evaluate_stream
from laconic.evaluation.tables import build_terminal_table, print_table
from laconic.experiment.load_run import LoadedRun
from laconic.storage import lock

NESTED_METHOD, LM_METHOD = "hope", "lm"
KNOWN_SETS = (*RECIPE_SPLITS, *STREAM_NAMES, *INTENT_DATASETS)
BASELINES = {"books": FRESH, "levels": "all levels"}  # condition that the others are compared with


class ClassIncrementalRun(NamedTuple):
    """Figures of one run on a set of classes."""

    run: str
    seed: int
    figures: Mapping[str, Any]


@dataclass(frozen=True)
class StreamResults:
    """Results of runs on streams and on sets of classes."""

    streams: Sequence[StreamTaskResult]
    classes: Sequence[ClassIncrementalRun]


def should_run_streams(runs: Sequence[str], datasets: Sequence[str]) -> bool:
    """Return whether streams are meant: a run has method hope, or a language model is given a stream's name."""
    recipes = load_recipes(runs).values()
    has_stream_name = bool(set(datasets) & {*STREAM_NAMES, *INTENT_DATASETS})
    return any(recipe.method == NESTED_METHOD for recipe in recipes) or (
        has_stream_name and all(map(is_language_model, recipes))
    )


def is_language_model(recipe: Recipe) -> bool:
    """Return whether a run can be evaluated on streams."""
    return recipe.method in (NESTED_METHOD, LM_METHOD)


def run_evaluations(request: EvalRequest, root: str | None, shots: int | None) -> StreamResults:
    """Evaluate every run on every task.

    Args:
        request: Runs and tasks.
        root: Folder of the sets of classes; None for the recipe's.
        shots: Number of training examples per class; None for all.

    Raises:
        UsageError: A task is not known, or a run has another method.
        PreemptedError: After a signal; finished items are stored.
    """
    unknown = next((name for name in request.tasks if name not in KNOWN_SETS), None)
    if unknown is not None:
        raise UsageError(f"--tasks {unknown}: runs of method hope and lm have the tasks {', '.join(KNOWN_SETS)}")
    results: list[StreamTaskResult] = []
    classes: list[ClassIncrementalRun] = []
    for path, title in zip(request.runs, short_run_names(request.runs), strict=True):
        seeds: list[int] = []
        items: dict[tuple[str, str], list[list[StreamItem]]] = {}
        recipe = None
        for folder in seed_runs(path):
            run = request.load_run(folder)
            recipe = run.recipe
            if not is_language_model(recipe):
                raise UsageError(f"{folder}: method {recipe.method} has no streams; evaluate it by itself")
            seeds.append(recipe.seed)
            with lock.lock_folder(folder / EVALUATIONS_FOLDER):
                for name in request.tasks:
                    if name in INTENT_DATASETS:
                        figures = evaluate_classes(request, run, title, name, root, shots)
                        classes.append(ClassIncrementalRun(title, recipe.seed, figures))
                        continue
                    for stream in build_requests(run, name, request.limit):
                        stream_items = evaluate_on_stream(request, run, stream, seed_run_name(title, path, folder))
                        items.setdefault((stream.name, stream.stream), []).append(stream_items)
        info = describe_recipe(recipe) if recipe else {}
        results += [
            StreamTaskResult(*key, title, tuple(seeds), stream_items, info) for key, stream_items in items.items()
        ]
    order = list(dict.fromkeys(result.title for result in results))
    return StreamResults(sorted(results, key=lambda result: order.index(result.title)), classes)


def describe_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the properties of a run that its results depend on."""
    info: dict[str, Any] = {"method": recipe.method, "source": recipe.data.source, "table_row": recipe.table_row}
    if recipe.method != NESTED_METHOD:
        return info
    return info | {
        "mixer": None if recipe.mixer is None else recipe.mixer.kind,
        "chunk_sizes": None if recipe.cms is None else list(recipe.cms.chunk_sizes),
        "inner_loop": recipe.inner_loop is None or recipe.inner_loop.enabled,
    }


def evaluate_on_stream(request: EvalRequest, run: LoadedRun, stream: StreamRequest, name: str) -> list[StreamItem]:
    """Evaluate a run on one stream; stored results are loaded and partial ones resumed."""
    metadata = describe_evaluation(
        run,
        "streams",
        stream.name,
        limit=request.limit,
        variant={} if stream.stream == stream.name else {"stream": stream.stream},
        key={"data": stream.source.fingerprint},
    )
    with (
        progress(f"{name} {stream.name}") as report,
        interruptible_evaluation(request.stop, request.device, f"{run.folder}, {stream.name}"),
    ):
        options: dict[str, Any] = {
            "bytes_per_token": stream.bytes_per_token,
            "metadata": metadata,
            "folder": run.folder / EVALUATIONS_FOLDER,
            "extra_files": copy_recipe(run),
            "progress": report,
        }
        if stream.stream == "books":
            return evaluate_books(stateful_model(run), stream.source, request.device, **options)
        if stream.stream == "levels":
            return evaluate_levels(ablated_models(run), stream.source, request.device, **options)
        stream_name: Any = stream.stream
        options["batch_size"] = stream.batch_size
        return evaluate_stream(stateful_model(run), stream_name, stream.source, request.device, **options)


def evaluate_classes(
    request: EvalRequest, run: LoadedRun, title: str, name: str, root: str | None, shots: int | None
) -> dict[str, Any]:
    """Evaluate class-incremental learning on a data set; stored results are loaded and partial ones resumed."""
    plan = plan_class_incremental(
        run.parts.decoder,
        run.parts.tokenizer,
        name,
        root or (run.recipe.data.data_dir and str(run.recipe.data.data_dir)),
        max_test_per_class=request.limit,
        max_train_per_class=shots,
    )
    metadata = describe_evaluation(run, "class_incremental", name, limit=request.limit, shots=shots)
    with (
        progress(f"{title} {name}, methods and orders") as report,
        interruptible_evaluation(request.stop, request.device, f"{run.folder}, {name}"),
    ):
        records = run_resumable(
            run.folder / EVALUATIONS_FOLDER,
            metadata,
            len(plan),
            lambda units: plan.run_units(units, metadata, lambda text: log_message(f"{title}: {text}")),
            batch_size=1,
            summarize=plan.summarise,
            extra_files=copy_recipe(run),
            progress=report,
        )
    return plan.summarise(records)


def print_results(results: StreamResults, as_json: bool) -> None:
    """Print the results on standard output."""
    if as_json:
        print(json.dumps(results_to_json(results), ensure_ascii=False, allow_nan=False))
        return
    if results.streams:
        print_table(build_stream_table(results.streams))
        print("\n".join([*describe_gains(results.streams), LEGEND]))
    for class_run in results.classes:
        header, *rows = class_report.build_table(class_run.figures)
        print_table(build_terminal_table(header, rows, title=f"{class_run.run}, {class_run.figures['set']}"))
    if results.classes:
        print(class_report.LEGEND)


def results_to_json(results: StreamResults) -> dict[str, Any]:
    """Return the results as JSON."""
    streams = [
        result_to_json(result) | {"gains": [gain_to_json(gain) for gain in compute_gains(result)]}
        for result in results.streams
    ]
    classes = [{"run": class_run.run, "seed": class_run.seed, **class_run.figures} for class_run in results.classes]
    return {"schema": 2, "streams": streams, "classes": classes}


def compute_gains(result: StreamTaskResult) -> list[PairedGain]:
    """Return what conditions save against the baseline: a fresh state, all levels, or a state that is reset."""
    baseline = BASELINES.get(result.stream)
    if result.stream == "ppl":
        baseline = next((name for name in ("learn, reset", "frozen") if name in result.conditions), None)
    return [] if baseline is None else compute_paired_gains(result.items, baseline)


def gain_to_json(gain: PairedGain) -> dict[str, Any]:
    """Return a gain as JSON; the standard error is null for a single item."""
    return gain._asdict() | {"standard_error": gain.standard_error if gain.num_items > 1 else None}


def describe_gains(results: Sequence[StreamTaskResult]) -> list[str]:
    """Return the paired differences in NLL as sentences."""
    sentences: list[str] = []
    for result in results:
        gains = compute_gains(result)
        loses = result.stream == "levels"
        for gain in gains:
            saved = -gain.nats_saved if loses else gain.nats_saved
            error = (
                f" ± {gain.standard_error:.4f} over {gain.num_items} items" if gain.num_items > 1 else " on one item"
            )
            sentences.append(
                f"{result.run}, {result.title}: {gain.condition} {'loses' if loses else 'saves'} {saved:+.4f} nats per "
                f"token against {gain.baseline}{error}"
            )
        if (share := retained_share(gains)) is not None:
            sentences.append(f"{result.run}, {result.title}: after another book {100 * share:.0f} % of that is left")
    return sentences


def load_results(paths: Sequence[str]) -> StreamResults:
    """Load the stored results of runs: of each task the latest step with the most items."""
    results = [
        StreamTaskResult(
            stored.task,
            stored.variant.get("stream", stored.task),
            stored.title,
            stored.seeds,
            [items_from_records(records) for records in stored.records],
            describe_recipe(stored.recipe),
        )
        for stored in load_stored_tasks(paths, "streams")
    ]
    classes = [
        ClassIncrementalRun(stored.title, evaluation.metadata.seed, evaluation.figures)
        for stored in load_stored_tasks(paths, "class_incremental")
        for evaluation in stored.stored
    ]
    return StreamResults(sorted(results, key=lambda result: result.title), classes)


def build_sections(paths: Sequence[str]) -> list[PageSection]:
    """Return the sections of a report about stored results on streams and classes."""
    results = load_results(paths)
    training = [
        (seed_run_name(title, path, folder), load_metric_series(folder))
        for path, title in zip(paths, short_run_names(paths), strict=True)
        for folder in seed_runs(path)
    ]
    return [
        *streams_report.build_sections(results.streams, describe_gains(results.streams), training),
        *map(class_section, results.classes),
    ]


def class_section(result: ClassIncrementalRun) -> PageSection:
    """Return the section about one run on a set of classes."""
    header, *rows = class_report.build_table(result.figures)
    blocks = [render_table(PageTable(header, rows))]
    if plots := [PagePlot(*figure) for figure in class_report.build_figures(result.figures)]:
        blocks.append(render_plots(plots))
    title = f"Classes {result.figures['set']}: {result.run}, seed {result.seed}"
    return PageSection(title, [*blocks, class_report.LEGEND])


def load_metric_series(folder: Path) -> MetricSeries:
    """Return the training metrics of a run that are about levels and memories, by name."""
    series: dict[str, list[tuple[float, float]]] = {}
    file = folder / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        row = json.loads(line)
        for name in (name for name in row if is_plotted_metric(name) and isinstance(row[name], float)):
            series.setdefault(name, []).append((float(row["step"]), row[name]))
    return series
