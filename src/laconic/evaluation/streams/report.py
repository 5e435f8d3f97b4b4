"""The sections of a report about streams: tables, NLL by position, recall by gap, levels in training, papers."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from laconic.evaluation.report.page import PagePlot, PageSection
from laconic.evaluation.report.papers import list_papers
from laconic.evaluation.report.plots import PlotSeries, Points, plot_lines
from laconic.evaluation.runs import seed_run_name, seed_runs, short_run_names
from laconic.evaluation.streams import table
from laconic.evaluation.streams.table import stream_name, stream_title
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import build_table

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
    """Plot the NLL of the position buckets of texts by their first position."""
    series = [
        PlotSeries(
            f"{result.run}, {condition}",
            [
                (float(row.metric.partition("-")[0]), row.estimate.mean)
                for row in table.estimate_metrics(result, condition)
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
    """Plot the percentage of queries answered by gap, for each number of pairs."""
    points: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        for row in table.metric_rows(result) if stream_name(result) == "mqar" else ():
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
    """Return the sections about streams, and about levels and memories in the training of the runs."""
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
        PageSection("Streams: what is learned while reading", [table.describe_gains(results) or table.LEGEND]),
        PageSection("Streams: by position and gap", [plots]),
    ]
    for title, same in groupby(results, stream_title):
        rows = [(table.metric_rows(x), f"{x.run}, seeds {', '.join(map(str, x.seeds))}") for x in same]
        sections.append(PageSection(f"Stream {title}", [build_table(table.PAGE_COLUMNS, *row) for row in rows]))
    return [
        *sections,
        PageSection("Levels and memories in training", [plot_training_metrics(training)]),
        PageSection("What papers report on nested learning", list_papers(["nested"]) if results else []),
        PageSection("Limitations of stream results", [CAVEATS]),
    ]
