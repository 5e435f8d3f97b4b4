"""Stream results over seeds as tables, JSON and pages, with NLL by position, recall by gap, and levels in training."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation import statistics, tables
from laconic.evaluation.report.page import PagePlot, PageSection
from laconic.evaluation.report.papers import list_papers
from laconic.evaluation.report.plots import PlotSeries, Points, plot_lines
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.runs import seed_run_name, seed_runs, short_run_names
from laconic.evaluation.statistics import Estimate, ScoreMatrix
from laconic.evaluation.streams.metrics import OVERALL
from laconic.evaluation.streams.texts import AFTER_OTHER_BOOK, AFTER_READING, FRESH
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import Column, Table, build_table

# The streams that are scored by NLL, all others are by shares, and the conditions that the others are compared with.
BASELINES = {"books": FRESH, "levels": "all levels", "ppl": "learn, reset"}
LEGEND = (
    "score: NLL in nats (ppl, books, levels) or percent; every item of a metric counts the same; updates: of each "
    "level per item, fastest first; state: bytes per sequence at its end. learn: fast weights are updated; frozen: "
    "they are not."
)


def stream_name(result: RunResult) -> str:
    return result.variant.get("stream", result.task)


def stream_title(result: RunResult) -> str:
    stream = stream_name(result)
    return stream if result.task == stream else f"{stream} ({result.task})"


def is_nll(result: RunResult) -> bool:
    return stream_name(result) in BASELINES


class MetricRow(NamedTuple):
    """The mean of a metric over items and seeds: a row of the table."""

    result: RunResult
    condition: str
    metric: str
    estimate: Estimate


def format_interval(row: MetricRow) -> str:
    low, high = row.estimate.low, row.estimate.high
    return f"{low:.4f} – {high:.4f}" if is_nll(row.result) else tables.format_interval(row.estimate)


PAGE_COLUMNS = (
    Column("condition", lambda row: row.condition, is_text=True),
    Column("metric", lambda row: row.metric, is_text=True),
    Column("score", lambda row: (tables.format_mean if is_nll(row.result) else tables.format_accuracy)(row.estimate)),
    Column("95 %", lambda row: "–" if row.estimate.num_items == row.estimate.num_seeds == 1 else format_interval(row)),
    Column("items", lambda row: f"{row.estimate.num_items:,}"),
    Column("updates", lambda row: ", ".join(f"{n:.4g}" for n in updates_per_level(row.result, row.condition)) or "–"),
    Column("state", lambda row: f"{mean_state_bytes(row.result, row.condition):,}"),
)
COLUMNS = (
    Column("stream", lambda row: stream_title(row.result), is_text=True),
    Column("run", lambda row: row.result.run, is_text=True),
    *PAGE_COLUMNS,
)


def metric_scores(items_by_seed: Sequence[Sequence[EvalItem]], condition: str, metric: str) -> ScoreMatrix:
    """Return the score of every item that has the metric, [R, N]."""
    sums = [[item.conditions[condition]["sums"].get(metric) for item in items] for items in items_by_seed]
    return np.array([[score / n for score, n in filter(None, seed)] for seed in sums], dtype=np.float64)


def estimate_metrics(result: RunResult, condition: str) -> list[MetricRow]:
    """Return every metric of a condition: the overall one first, then in natural order of names."""
    names = {metric for item in result.items_by_seed[0] for metric in item.conditions[condition]["sums"]}
    estimate = statistics.estimate_mean if is_nll(result) else statistics.estimate_proportion
    return [
        MetricRow(result, condition, name, estimate(metric_scores(result.items_by_seed, condition, name)))
        for name in sorted(names, key=lambda metric: (metric != OVERALL, natural_sort_key(metric)))
    ]


def natural_sort_key(text: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts 8 before 16."""
    parts = "".join(c if c.isdigit() else f" {c} " for c in text).split()
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def updates_per_level(result: RunResult, condition: str) -> list[float]:
    return np.mean([item.conditions[condition]["level_updates"] for item in result.pooled_items], axis=0).tolist()


def mean_state_bytes(result: RunResult, condition: str) -> int:
    return round(float(np.mean([item.conditions[condition]["state_bytes"] for item in result.pooled_items])))


def metric_rows(result: RunResult) -> list[MetricRow]:
    return [row for condition in result.conditions for row in estimate_metrics(result, condition)]


def build_stream_table(results: Sequence[RunResult]) -> Table:
    return build_table(COLUMNS, [row for result in results for row in metric_rows(result)])


def result_to_json(result: RunResult) -> dict[str, Any]:
    conditions = {
        condition: {
            "metrics": {row.metric: row.estimate for row in estimate_metrics(result, condition)},
            "level_updates": updates_per_level(result, condition),
            "state_bytes": mean_state_bytes(result, condition),
        }
        for condition in result.conditions
    }
    data = {
        "task": result.task,
        "stream": stream_name(result),
        "run": result.run,
        **result.info,
        "seeds": list(result.seeds),
        "items": len(result.items_by_seed[0]),
        "unit": "nats" if is_nll(result) else "share",
        "conditions": conditions,
        "gains": compute_gains(result),
    }
    return tables.figures_to_json(data)


class PairedGain(NamedTuple):
    """NLL per token that a condition saves against another, mean over items; its standard error, None for one item."""

    condition: str
    baseline: str
    nats_saved: float
    standard_error: float | None
    num_items: int


def compute_gains(result: RunResult) -> list[PairedGain]:
    """Return what conditions save against that of `BASELINES`.

    Conditions are paired by item, and an item counts with its mean over seeds. A standard error over the sections of a
    few books is of those books only.
    """
    baseline = BASELINES.get(stream_name(result))
    if baseline is None or baseline not in result.conditions:
        return []
    base = metric_scores(result.items_by_seed, baseline, OVERALL)
    gains: list[PairedGain] = []
    for condition in result.conditions:
        if condition != baseline:
            saved = (base - metric_scores(result.items_by_seed, condition, OVERALL)).mean(0)
            n = len(saved)
            se = float(saved.std(ddof=1) / math.sqrt(n)) if n > 1 else None
            gains.append(PairedGain(condition, baseline, float(saved.mean()), se, n))
    return gains


def retained_share(gains: Sequence[PairedGain]) -> float | None:
    """Return the share of what reading a book saves that is left after another book."""
    saved = {gain.condition: gain.nats_saved for gain in gains}
    if AFTER_READING not in saved or AFTER_OTHER_BOOK not in saved or saved[AFTER_READING] <= 0:
        return None
    return saved[AFTER_OTHER_BOOK] / saved[AFTER_READING]


def describe_gains(results: Sequence[RunResult]) -> list[str]:
    sentences: list[str] = []
    for result in results:
        head = f"{result.run}, {stream_title(result)}"
        gains = compute_gains(result)
        for gain in gains:
            n, se = gain.num_items, gain.standard_error
            error = " on one item" if se is None else f" ± {se:.4f} over {n} items"
            verb = "loses" if gain.nats_saved < 0 else "saves"
            nats = f"{abs(gain.nats_saved):.4f} nats per token against {gain.baseline}"
            sentences.append(f"{head}: {gain.condition} {verb} {nats}{error}")
        if (share := retained_share(gains)) is not None:
            sentences.append(f"{head}: after another book {100 * share:.0f} % of that is left")
    return sentences


CAVEATS = (
    "Levels that change slowly forget later, but they forget too.",
    "Papers' figures come from other model sizes, texts and budgets, and are shown for orientation only.",
    "The needle task resembles RULER's, and fuzzy recall MAD's; neither is the published task.",
    "The paper does not give the depth, chunk sizes and objective of the levels; ours are choices.",
)
# Suffixes of metrics in metrics.jsonl, and what a plot of them shows.
TRAINING_PLOTS = (
    (("_updates",), "Updates of each level, per row of a batch"),
    (("_update_size",), "Size of level updates, relative to the level's start; a level near 0 is dead"),
    (("_half_life", "_half_life_low", "_half_life_high"), "Half-life of what is written, in tokens; low: a tenth"),
    (("_step", "_step_low", "_step_high"), "Step sizes of the memories; low: a tenth"),
    (("_norm",), "Size of the memories at the end of a batch, ‖state‖ / √E"),
    (("_capped",), "Shares of writes capped"),
    (("_rank",), "Rank of level changes, in outer products"),
    (("state_bytes",), "Size of the state, in bytes of one sequence"),
)
TRAINING_SUFFIXES = tuple(suffix for suffixes, _ in TRAINING_PLOTS for suffix in suffixes)
MetricSeries = Mapping[str, Points]  # (step, value) of each metric of a run


def plot_nll_by_position(results: Sequence[RunResult]) -> list[PagePlot]:
    series = [
        PlotSeries(
            f"{result.run}, {condition}",
            [
                (float(row.metric.partition("-")[0]), row.estimate.mean)
                for row in estimate_metrics(result, condition)
                if row.metric.replace("-", "").isdigit()
            ],
        )
        for result in results
        if stream_name(result) == "ppl"
        for condition in result.conditions
    ]
    caption = "Texts read in order. reset: every passage starts from the initial state; frozen: no updates."
    return plot_lines("NLL by position", series, caption, x_label="tokens read before", y_label="NLL per token, nats")


def plot_recall_by_gap(results: Sequence[RunResult]) -> list[PagePlot]:
    points: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for row in metric_rows(result) if stream_name(result) == "mqar" else ():
            pairs, _, gap = row.metric.partition(", gap ")
            if gap:
                line = points.setdefault(f"{result.run}, {row.condition}, {pairs}", [])
                line.append((float(gap.partition("-")[0]), 100 * row.estimate.mean))
    caption, x_label = "frozen: no updates, so only chance is left.", "tokens from a pair to its query, at least"
    series = [PlotSeries(*line) for line in points.items()]
    return plot_lines("Recall by gap", series, caption, x_label=x_label, y_label="correct, %", y_scale="percent")


def plot_training_metrics(runs: Sequence[tuple[str, MetricSeries]]) -> list[PagePlot]:
    plots: list[PagePlot] = []
    for suffixes, title in TRAINING_PLOTS:
        series = [
            PlotSeries(f"{run}, {name.replace('_', ' ')}", points)
            for run, metrics in runs
            for name, points in sorted(metrics.items())
            if name.endswith(suffixes)
        ]
        plots += plot_lines(title, series, x_label="training steps", y_scale="log")
    return plots


def load_metric_series(folder: Path) -> MetricSeries:
    """Return the training metrics of a run that are about levels and memories, by name."""
    series: dict[str, list[tuple[float, float]]] = {}
    file = folder / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():  # a run in progress may have a partial last line
        row = json.loads(line)
        for name in row:
            if name.endswith(TRAINING_SUFFIXES) and name != "grad_norm" and isinstance(row[name], float):
                series.setdefault(name, []).append((float(row["step"]), row[name]))
    return series


def build_sections(results: Sequence[RunResult], paths: Sequence[str]) -> list[PageSection]:
    training = [
        (seed_run_name(title, path, folder), load_metric_series(folder))
        for path, title in zip(paths, short_run_names(paths), strict=True)
        for folder in seed_runs(path)
    ]
    if not results and not any(metrics for _, metrics in training):
        return []
    results = sorted(results, key=stream_title)
    plots = [*plot_nll_by_position(results), *plot_recall_by_gap(results)]
    sections = [
        PageSection("Streams: what is learned while reading", [describe_gains(results) or LEGEND]),
        PageSection("Streams: by position and gap", [plots]),
    ]
    for title, same in groupby(results, stream_title):
        rows = [(metric_rows(x), f"{x.run}, seeds {', '.join(map(str, x.seeds))}") for x in same]
        sections.append(PageSection(f"Stream {title}", [build_table(PAGE_COLUMNS, *row) for row in rows]))
    return [
        *sections,
        PageSection("Levels and memories in training", [plot_training_metrics(training)]),
        PageSection("What papers report on nested learning", list_papers(["nested"]) if results else []),
        PageSection("Limitations of stream results", [CAVEATS]),
    ]
