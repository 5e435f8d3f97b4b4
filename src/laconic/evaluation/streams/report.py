"""The sections of a report about streams: tables, NLL by position, recall by gap, levels in training, papers."""

from collections.abc import Mapping, Sequence

from laconic.evaluation.report.page import (
    PagePlot,
    PageSection,
    PageTable,
    render_details,
    render_list,
    render_plots,
    render_table,
)
from laconic.evaluation.report.plots import NUM_COLORS, PlotSeries, Points, has_matplotlib, plot_lines
from laconic.evaluation.streams import paper_tables
from laconic.evaluation.streams.table import LEGEND, StreamTaskResult, estimate_metrics, result_rows

LINE_STYLES = ("-", "--", ":", "-.")
FIXED_CAVEATS = (
    "Forgetting is not solved: a level that changes slowly keeps longer, and loses too.",
    "Figures of papers are of other sizes, texts and budgets than tiny runs: beside, not against.",
    "The needle task is like RULER's and fuzzy recall like MAD's: neither is the published task.",
    "Depth, chunk sizes and the objective of levels are not printed in the paper; ours are choices.",
)
# Suffixes of metrics in metrics.jsonl, y label, title, caption.
TRAINING_PLOTS = (
    (("_fired",), "updates per batch", "Updates of each level", "How often each level was updated in a batch."),
    (
        ("_update",),
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
        ("_capped", "_contracted", "_guarded"),
        "share",
        "Active bounds",
        "Writes limited by the cap, steps reduced where an erase would overshoot, states at their norm limit.",
    ),
    (("_rank",), "outer products", "Rank of level changes", "Number of outer products in a change."),
    (("state_bytes",), "bytes per row", "Size of the state", "Of one sequence, whatever its length."),
)
MetricSeries = Mapping[str, Points]  # (step, value) of each metric of a run


def nll_by_position(result: StreamTaskResult, condition: str) -> list[tuple[float, float]]:
    """Return (first position, NLL) of the position buckets of a condition."""
    return sorted(
        (float(metric.partition("-")[0]), estimate.mean)
        for metric, estimate in estimate_metrics(result, condition)
        if metric.replace("-", "").isdigit()
    )


def recall_by_gap(result: StreamTaskResult, condition: str) -> dict[str, list[tuple[float, float]]]:
    """Return (gap, percent correct) of a condition by number of pairs."""
    points: dict[str, list[tuple[float, float]]] = {}
    for metric, estimate in estimate_metrics(result, condition):
        pairs, _, gap = metric.partition(", gap ")
        if gap:
            points.setdefault(pairs, []).append((float(gap.partition("-")[0]), 100 * estimate.mean))
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


def plot_nll_by_position(results: Sequence[StreamTaskResult]) -> list[PagePlot]:
    """Plot the NLL by the number of tokens read before."""
    series = [
        (f"{result.run}, {condition}", nll_by_position(result, condition))
        for result in results
        if result.stream == "ppl"
        for condition in result.conditions
    ]
    caption = "Texts read in order. reset: every passage starts from the initial state; frozen: no updates."
    return plot_series(series, "NLL by position", caption, x_label="tokens read before", y_label="NLL per token, nats")


def plot_recall_by_gap(results: Sequence[StreamTaskResult]) -> list[PagePlot]:
    """Plot recall by the distance from a pair to its query."""
    series = [
        (f"{result.run}, {condition}, {pairs}", points)
        for result in results
        if result.stream == "mqar"
        for condition in result.conditions
        for pairs, points in recall_by_gap(result, condition).items()
    ]
    return plot_series(
        series,
        "Recall by gap",
        "frozen: no updates, so only chance is left.",
        x_label="tokens from a pair to its query, at least",
        y_label="correct, %",
        is_percent=True,
    )


def plot_training_metrics(runs: Sequence[tuple[str, MetricSeries]]) -> list[PagePlot]:
    """Plot the metrics of levels and memories over the steps of training."""
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


def is_plotted_metric(name: str) -> bool:
    """Return whether a training metric is about levels or memories."""
    return name != "grad_norm" and any(name.endswith(suffixes) for suffixes, *_ in TRAINING_PLOTS)


def build_sections(
    results: Sequence[StreamTaskResult], gains: Sequence[str], training: Sequence[tuple[str, MetricSeries]]
) -> list[PageSection]:
    """Return the sections about streams.

    Args:
        results: Stored results.
        gains: Sentences about gains between conditions.
        training: Training metrics of each run.
    """
    if not results and not any(metrics for _, metrics in training):
        return []
    header = ("condition", "metric", "score", "95 %", "items", "updates", "state")
    sections = [PageSection("Streams: what is learned while reading", [render_list(gains)] if gains else [LEGEND])]
    plots = [*plot_nll_by_position(results), *plot_recall_by_gap(results)]
    sections.append(PageSection("Streams: by position and gap", [render_plots(plots)] if plots else []))
    for title in dict.fromkeys(result.title for result in results):
        tables = [
            render_table(
                PageTable(header, result_rows(result), f"{result.run}, seeds {', '.join(map(str, result.seeds))}", 2)
            )
            for result in results
            if result.title == title
        ]
        sections.append(PageSection(f"Stream {title}", tables))
    curves = plot_training_metrics(training)
    sections.append(PageSection("Levels and memories in training", [render_plots(curves)] if curves else []))
    papers = [
        block
        for table in paper_tables.load_paper_tables()
        for block in (
            render_details(f"{table.title} [{table.source}]", [table.description, verdict_table(table, results)]),
        )
    ]
    return [*sections, PageSection("What papers report on nested learning", papers if results else [])]


def verdict_table(table: paper_tables.StreamPaperTable, results: Sequence[StreamTaskResult]) -> str:
    """Return a paper's table with a verdict on each row."""
    verdicts = paper_tables.reproduction_verdicts(table, results)
    rows = [[*row, verdict] for row, verdict in zip(table.rows, verdicts, strict=True)]
    return render_table(PageTable([*table.columns, "here"], rows, num_text_columns=1))
