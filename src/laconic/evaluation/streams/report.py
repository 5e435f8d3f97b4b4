"""The sections of a report about streams: tables, NLL by position, recall by gap, levels in training, papers."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from laconic.evaluation.report.page import PagePlot, PageSection, render_list, render_plots, render_table
from laconic.evaluation.report.papers import render_papers
from laconic.evaluation.report.plots import NUM_COLORS, PlotSeries, Points, has_matplotlib, plot_lines
from laconic.evaluation.runs import seed_run_name, seed_runs, short_run_names
from laconic.evaluation.streams import table
from laconic.evaluation.streams.table import stream_name, stream_title
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import build_table

LINE_STYLES = ("-", "--", ":", "-.")
CAVEATS = (
    "Levels that change slowly forget later, but they forget too.",
    "Papers' figures come from other model sizes, texts and budgets, and are shown for orientation only.",
    "The needle task resembles RULER's, and fuzzy recall MAD's; neither is the published task.",
    "The paper does not give the depth, chunk sizes and objective of the levels; ours are choices.",
)
# Suffixes of metrics in metrics.jsonl, y label, title, caption.
TRAINING_PLOTS = (
    (("_updates",), "updates per row", "Updates of each level", "How often each was updated in a row of a batch."),
    (
        ("_update_size",),
        "‖Δθ‖ / ‖θ₀‖ of an update",
        "Size of level updates",
        "Relative to the level's start, mean over layers; a level near 0 is dead.",
    ),
    (
        ("_half_life", "_half_life_low", "_half_life_high"),
        "tokens",
        "Half-life of what is written",
        "For the last tokens of a row: the median; a tenth is below low, a tenth above high.",
    ),
    (("_step", "_step_low", "_step_high"), "size of a write", "Step sizes of the memories", "For the same tokens."),
    (("_norm",), "‖state‖ / √E", "Size of the memories", "At the end of a batch, mean over rows, heads and layers."),
    (
        ("_capped",),
        "share",
        "Capped writes",
        "Writes limited by the cap.",
    ),
    (("_rank",), "outer products", "Rank of level changes", "Number of outer products in a change."),
    (("state_bytes",), "bytes per row", "Size of the state", "Of one sequence, whatever its length."),
)
TRAINING_SUFFIXES = tuple(suffix for suffixes, *_ in TRAINING_PLOTS for suffix in suffixes)
MetricSeries = Mapping[str, Points]  # (step, value) of each metric of a run


def nll_of_buckets(result: RunResult, condition: str) -> list[tuple[float, float]]:
    """Return (first position, NLL) of the position buckets of a condition."""
    return sorted(
        (float(row.metric.partition("-")[0]), row.estimate.mean)
        for row in table.estimate_metrics(result, condition)
        if row.metric.replace("-", "").isdigit()
    )


def recall_by_gap(result: RunResult, condition: str) -> dict[str, list[tuple[float, float]]]:
    """Return (gap, percent correct) of a condition by number of pairs."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in table.estimate_metrics(result, condition):
        pairs, _, gap = row.metric.partition(", gap ")
        if gap:
            points.setdefault(pairs, []).append((float(gap.partition("-")[0]), 100 * row.estimate.mean))
    return points


def plot_series(
    series: Sequence[tuple[str, Points]],
    title: str,
    caption: str,
    *,
    x_label: str,
    y_label: str,
    is_log: bool = False,
    is_percent: bool = False,
) -> list[PagePlot]:
    """Return a plot of named lines; empty where there is nothing to plot."""
    named = [(name, points) for name, points in series if points]
    if not named or not has_matplotlib():
        return []
    lines = [
        PlotSeries(name, points, i % NUM_COLORS, LINE_STYLES[i // NUM_COLORS % len(LINE_STYLES)])
        for i, (name, points) in enumerate(named)
    ]
    image = plot_lines(lines, x_label=x_label, y_label=y_label, alt_text=title, is_log=is_log, is_percent=is_percent)
    return [PagePlot(title, caption, image)]


def plot_nll_by_position(results: Sequence[RunResult]) -> list[PagePlot]:
    series = [
        (f"{result.run}, {condition}", nll_of_buckets(result, condition))
        for result in results
        if stream_name(result) == "ppl"
        for condition in result.conditions
    ]
    caption = "Texts read in order. reset: every passage starts from the initial state; frozen: no updates."
    return plot_series(series, "NLL by position", caption, x_label="tokens read before", y_label="NLL per token, nats")


def plot_recall_by_gap(results: Sequence[RunResult]) -> list[PagePlot]:
    series = [
        (f"{result.run}, {condition}, {pairs}", points)
        for result in results
        if stream_name(result) == "mqar"
        for condition in result.conditions
        for pairs, points in recall_by_gap(result, condition).items()
    ]
    caption, x_label = "frozen: no updates, so only chance is left.", "tokens from a pair to its query, at least"
    return plot_series(series, "Recall by gap", caption, x_label=x_label, y_label="correct, %", is_percent=True)


def plot_training_metrics(runs: Sequence[tuple[str, MetricSeries]]) -> list[PagePlot]:
    plots: list[PagePlot] = []
    for suffixes, y_label, title, caption in TRAINING_PLOTS:
        series = [
            (f"{run}, {metric_label(name, suffixes)}", points)
            for run, metrics in runs
            for name, points in sorted(metrics.items())
            if name.endswith(suffixes)
        ]
        plots += plot_series(series, title, caption, x_label="training steps", y_label=y_label, is_log=True)
    return plots


def metric_label(name: str, suffixes: Sequence[str]) -> str:
    """Return a metric's name in words, without what the plot's title says."""
    is_common = all(suffix.startswith(suffixes[0]) for suffix in suffixes)
    label = name.replace(suffixes[0], "") if is_common else name
    return (label or name).replace("_", " ")


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
    gains = table.describe_gains(results)
    lead = render_list(gains) if gains else table.LEGEND
    sections = [PageSection("Streams: what is learned while reading", [lead])]
    plots = [*plot_nll_by_position(results), *plot_recall_by_gap(results)]
    sections.append(PageSection("Streams: by position and gap", [render_plots(plots)] if plots else []))
    for title, same in groupby(results, stream_title):
        rows = [(table.metric_rows(x), f"{x.run}, seeds {', '.join(map(str, x.seeds))}") for x in same]
        tables = [render_table(build_table(table.PAGE_COLUMNS, *row)) for row in rows]
        sections.append(PageSection(f"Stream {title}", tables))
    curves = plot_training_metrics(training)
    return [
        *sections,
        PageSection("Levels and memories in training", [render_plots(curves)] if curves else []),
        PageSection("What papers report on nested learning", render_papers(["nested"]) if results else []),
        PageSection("Limitations of stream results", [render_list(CAVEATS)]),
    ]
