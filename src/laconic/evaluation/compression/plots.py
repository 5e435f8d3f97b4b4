"""Plots of the compression report: quality against vectors, and loss along the tail."""

from collections.abc import Sequence

from markupsafe import Markup

from laconic.evaluation.compression.evaluate import BUCKET_TOKENS
from laconic.evaluation.compression.pareto import FIXED_LENGTH, LEARNED_LENGTH, ORACLE_LENGTH, TEXT_END, ParetoPoint
from laconic.evaluation.compression.perplexity import FULL_TUNED, UNTRAINED, nll_by_position, nll_per_document
from laconic.evaluation.compression.table import is_recall
from laconic.evaluation.report.plots import NUM_COLORS, PlotSeries, plot_lines
from laconic.evaluation.suite import RunResult

CONDITION_TITLES = {
    "none": "no context",
    "full": "whole text",
    FULL_TUNED: "whole text, full-tuned",
    f"{UNTRAINED} none": f"no context, {UNTRAINED}",
}
SERIES_STYLES = {
    FIXED_LENGTH: ("o", "-"),
    LEARNED_LENGTH: ("D", "none"),
    TEXT_END: (".", ":"),
    ORACLE_LENGTH: (".", "--"),
}
POSITION_STYLES = {"none": ":", "compressed": "-", "full": "--"}


def condition_title(condition: str) -> str:
    return CONDITION_TITLES.get(condition, condition)


def plot_pareto(points: Sequence[ParetoPoint], results: Sequence[RunResult]) -> Markup:
    """Plot accuracy, or nats per token, against vectors per segment; horizontal lines are the whole text."""
    has_facts, runs = is_recall(results[0]), list(dict.fromkeys(result.run for result in results))
    series: list[PlotSeries] = []
    for color, run in enumerate(runs):
        for kind, (marker, linestyle) in SERIES_STYLES.items():
            means = [point.mean_point for point in points if (point.result.run, point.kind) == (run, kind)]
            values = [(x, 100 * y if has_facts else -y) for x, y in means]
            series.append(PlotSeries(f"{run}: {kind}", values, color % NUM_COLORS, linestyle, marker))
    ends = min(point.mean_point[0] for point in points), max(point.mean_point[0] for point in points)
    for result in results:
        for condition, y in full_text_levels(result):
            label, color = f"{result.run}: {condition_title(condition)}", runs.index(result.run) % NUM_COLORS
            series.append(PlotSeries(label, [(x, y) for x in ends], color, "-.", "None"))
    return plot_lines(
        series,
        x_label="mean vectors per segment",
        y_label="accuracy, %" if has_facts else "nats per token",
        alt_text="Quality by vectors per segment",
    )


def full_text_levels(result: RunResult) -> list[tuple[str, float]]:
    """Return the nats per token with the whole text."""
    conditions = [] if is_recall(result) else [name for name in (FULL_TUNED, "full") if name in result.conditions]
    return [(name, float(nll_per_document(result.items_by_seed, name).mean())) for name in conditions]


def plot_positions(results: Sequence[RunResult]) -> Markup:
    """Plot nats per token along the tail: without context, compressed, and with the whole text."""
    series = [
        PlotSeries(
            f"{result.run}: {condition_title(condition)}",
            [
                (BUCKET_TOKENS * (bucket + 0.5), y)
                for bucket, y in enumerate(nll_by_position(result.items_by_seed, condition))
            ],
            color % NUM_COLORS,
            linestyle,
        )
        for color, result in enumerate(results)
        for condition, linestyle in POSITION_STYLES.items()
        if condition in result.conditions
    ]
    return plot_lines(
        series,
        x_label="tokens of the tail",
        y_label="nats per token",
        alt_text="Nats per token by position in the tail",
    )
