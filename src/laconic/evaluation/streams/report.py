"""The page on runs that learn while they read: streams, books, classes, levels in training, and papers beside."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from laconic.evaluation.class_incremental import report as class_incremental_report
from laconic.evaluation.report import old_plots as report_plots
from laconic.evaluation.report import reported_learning
from laconic.evaluation.report.html import load_template
from laconic.evaluation.report.old_plots import has_matplotlib, new_axes, series_color, to_svg
from laconic.evaluation.report.runs_table import MIN_SEEDS
from laconic.evaluation.streams import table as streams_table
from laconic.evaluation.streams.table import StreamResult, estimate_metrics, metric_scores

LINE_STYLES = ("-", "--", ":", "-.")
FIXED_CAVEATS = (
    "Forgetting is not solved: a level that changes slowly keeps longer, and loses too.",
    "Figures of papers are of other sizes, texts and budgets than tiny runs: beside, not against.",
    "A needle here is RULER-like and fuzzy recall MAD-like: neither is the published task.",
    "Depth, chunk sizes and the objective of levels are not printed in the paper; ours are choices.",
)
TRAINING_PLOTS = (  # ends of names in the metrics, what is drawn up, title, text
    (("_fired",), "updates a batch", "Updates of each level", "How often each level fired in a training batch."),
    (("_update",), "‖Δθ‖ / ‖θ₀‖ of an update", "How far an update moves a level",
     "Relative to its start, the mean over layers; a level near 0 is dead."),
    (("_half_life", "_half_life_low", "_half_life_high"), "tokens", "Half-life of what is written",
     "Of the last tokens of a row: the middle, a tenth of them below low, a tenth above high."),
    (("_step", "_step_low", "_step_high"), "size of a write", "Steps of the memories", "Of the same tokens."),
    (("_norm",), "‖state‖ / √E", "Size of the memories", "At the end of a batch, the mean of rows, heads, layers."),
    (("_capped", "_contracted", "_guarded"), "share", "Bounds that bind",
     "Writes within the cap's bound, steps held back where an erase would overshoot, states at the guard's bound."),
    (("_rank",), "outer products", "Rank of what levels have learned", "In how many outer products a change is held."),
    (("state_bytes",), "bytes a row", "Size of the state", "Of one sequence, whatever it has read."),
)  # fmt: skip
MetricSeries = Mapping[str, Sequence[tuple[float, float]]]  # (step, number) of each name in a run's metrics


class StreamPlot(NamedTuple):
    """A picture with its title, what it shows, and the names of its lines in their order."""

    title: str
    caption: str
    svg: Markup
    legend: Sequence[str]


class ClassIncrementalSection(NamedTuple):
    """Classes of one run and seed: the table, and pictures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    plots: Sequence[tuple[str, str, Markup]]


def nll_by_position(result: StreamResult, condition: str) -> list[tuple[float, float]]:
    """(lower end, score) of the cells LOW-HIGH of a way: nats by how much was read."""
    found = [
        (int(each.metric.partition("-")[0]), each.estimate.mean)
        for each in estimate_metrics(result, condition)
        if each.metric.replace("-", "").isdigit()
    ]
    return sorted(found)


def recall_by_gap(result: StreamResult, condition: str) -> dict[str, list[tuple[float, float]]]:
    """Of each number of pairs, (gap, share right) of a way."""
    found: dict[str, list[tuple[float, float]]] = {}
    for each in estimate_metrics(result, condition):
        pairs, _, gap = each.metric.partition(", gap ")
        if gap:
            found.setdefault(pairs, []).append((float(gap.partition("-")[0]), 100 * each.estimate.mean))
    return {pairs: sorted(points) for pairs, points in found.items()}


def plot_series(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], x_label: str, y_label: str, title: str, caption: str,
          *, log: bool = False, percent: bool = False) -> StreamPlot | None:  # fmt: skip
    """Lines by name, in the page's colours; None where there is nothing to draw."""
    told = [(name, points) for name, points in series if points]
    if not told:
        return None
    figure, axes = new_axes(x_label, y_label)
    for i, (_, points) in enumerate(told):
        x, y = np.array(points).T
        style = LINE_STYLES[i // len(report_plots.COLORS) % len(LINE_STYLES)]
        axes.plot(x, y, color=series_color(i), linestyle=style, linewidth=1.6, marker="o" if len(x) < 12 else None,
                  markersize=3.5)  # fmt: skip
    if log and all(y > 0 for _, points in told for _, y in points):
        axes.set_yscale("log")
    if percent:
        axes.set_ylim(-2, 102)
    said = "; ".join(f"{name} ends at {points[-1][1]:.4g}" for name, points in told)
    return StreamPlot(
        title, caption, to_svg(figure, f"{title}: {said}.", title.replace(" ", "-")), [name for name, _ in told]
    )


def plot_nll_by_position(results: Sequence[StreamResult]) -> StreamPlot | None:
    """Nats by how much was read, carried and reset."""
    series = [
        (f"{x.run}, {way}", nll_by_position(x, way))
        for x in results
        if x.stream.startswith("ppl")
        for way in x.conditions
    ]
    text = "Texts read in order. Reset: every stretch begins anew; still: nothing learns."
    return plot_series(series, "tokens read before", "nats a token", "Nats by position", text)


def plot_recall_by_gap(results: Sequence[StreamResult]) -> StreamPlot | None:
    """Recall by the distance from a pair to its query."""
    series = [(f"{x.run}, {way}, {pairs}", points) for x in results if x.stream.startswith("mqar") for way in x.conditions
              for pairs, points in recall_by_gap(x, way).items()]  # fmt: skip
    return plot_series(series, "tokens from a pair to its query, at least", "right, %", "Recall by gap",
                 "Still: nothing learns, so that only chance is left.", percent=True)  # fmt: skip


def plot_training_metrics(courses: Sequence[tuple[str, MetricSeries]]) -> list[StreamPlot]:
    """What the metrics say of levels and memories, over the steps of training."""
    made: list[StreamPlot | None] = []
    for ends, up, title, text in TRAINING_PLOTS:
        series = [
            (f"{run}, {metric_label(name, ends)}", points)
            for run, course in courses
            for name, points in sorted(course.items())
            if name.endswith(ends)
        ]
        made.append(plot_series(series, "training steps", up, title, text, log=True))
    return [each for each in made if each is not None]


def metric_label(name: str, ends: Sequence[str]) -> str:
    """A number in words, without what the title says."""
    said = name.replace(ends[0], "") if all(end.startswith(ends[0]) for end in ends) else name
    return (said or name).replace("_", " ")


def is_plotted_metric(name: str) -> bool:
    """Whether a number of the metrics is drawn: of levels and memories, not of the update."""
    return name != "grad_norm" and any(name.endswith(ends) for ends, *_ in TRAINING_PLOTS)


def build_class_sections(classes: Sequence[tuple[str, Mapping[str, Any]]]) -> list[ClassIncrementalSection]:
    """Sets of classes, a group a run."""
    found: list[ClassIncrementalSection] = []
    for title, each in classes:
        header, *rows = class_incremental_report.build_table(each)
        found.append(
            ClassIncrementalSection(
                f"{title}, {each['set']}", header, rows, class_incremental_report.build_figures(each)
            )
        )
    return found


def build_table_rows(result: StreamResult) -> list[tuple[str, str, str, str, str, str, str]]:
    """The rows of a stream: way, cell, score, interval, items, updates, bytes."""
    rows: list[tuple[str, str, str, str, str, str, str]] = []
    for way in result.conditions:
        updates = ", ".join(f"{n:.4g}" for n in streams_table.updates_per_level(result, way)) or "–"
        for each in estimate_metrics(result, way):
            low, high = streams_table.format_bounds(result, each.estimate)
            rows.append((way, each.metric, streams_table.format_mean(result, each.estimate), f"{low} to {high}",
                         f"{metric_scores(result.records, way, each.metric).shape[1]:,}", updates,
                         f"{streams_table.mean_state_bytes(result, way):,}"))  # fmt: skip
    return rows


def list_caveats(results: Sequence[StreamResult]) -> list[str]:
    """What the figures leave open."""
    few = min((len(line.seeds) for line in results), default=MIN_SEEDS)
    found = [f"Seeds: {few} of some runs; another seed may fall outside these intervals."] if few < MIN_SEEDS else []
    return [*found, *FIXED_CAVEATS]


def render_stream_page(
    results: Sequence[StreamResult],
    sentences: Sequence[str],
    classes: Sequence[tuple[str, Mapping[str, Any]]],
    courses: Sequence[tuple[str, MetricSeries]],
    facts: Sequence[tuple[str, str]],
) -> str:
    """The whole file: `sentences` say what the figures say, `classes` are titles and what `recipe.incremental` gave."""
    pictures = (
        [*filter(None, (plot_nll_by_position(results), plot_recall_by_gap(results))), *plot_training_metrics(courses)]
        if has_matplotlib()
        else []
    )
    return load_template("inner_loop.html").render(
        lines=[(line, build_table_rows(line)) for line in results], sentences=sentences, groups=build_class_sections(classes), pictures=pictures,
        drawable=has_matplotlib(), legend=streams_table.LEGEND, classes_legend=class_incremental_report.LEGEND, facts=facts,
        reported=[(x, [*zip(x.rows, reported_learning.reproduction_verdicts(x, results), strict=True)])
                  for x in reported_learning.load_paper_tables()],
        colours=report_plots.COLORS, limits=list_caveats(results), shades=len(report_plots.COLORS),
    )  # fmt: skip
