"""Table and plots of class-incremental results."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from laconic.evaluation.class_incremental.protocol import METHODS, ForgettingMetrics
from laconic.evaluation.report.page import PagePlot, PageSection
from laconic.evaluation.report.plots import PlotSeries, plot_heat_maps, plot_lines
from laconic.evaluation.tables import Column, Table, build_table

ClassIncrementalResults = Mapping[str, Any]  # of `ClassIncrementalPlan.summarise`
LEGEND = (
    "Percent, mean over class orders with 95 % interval. AA: accuracy on all tasks at the end, among the classes seen; "
    "BWT: backward transfer. forgetting: best accuracy on a task less the one at the end. plasticity: "
    "accuracy on a task right after it was learned; a method that learns less has less to forget. "
    "updates: of each level, fastest first. state: bytes."
)


def build_method_table(results: ClassIncrementalResults, caption: str = "") -> Table:
    rows = sorted(results["methods"].items(), key=lambda row: METHODS.index(row[0]))  # stored JSON sorts them by name
    return build_table(COLUMNS, rows, caption)


def first_notes(row: tuple[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    return row[1]["notes"][0] if row[1]["notes"] else {}


def format_metric(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return "–"
    mean, low, high = (100 * metric[key] + 0.0 for key in ("mean", "low", "high"))
    return f"{mean:.1f}" if metric["sd"] is None else f"{mean:.1f} ({low:.1f} to {high:.1f})"


COLUMNS = (
    Column("method", lambda row: row[0], is_text=True),
    *(
        Column(name, lambda row, name=name: format_metric(row[1]["metrics"].get(name)))
        for name in ForgettingMetrics._fields
    ),
    Column("updates", lambda row: ", ".join(f"{n:,}" for n in first_notes(row).get("updates", ())) or "–"),
    Column("state", lambda row: f"{first_notes(row)['state_bytes']:,}" if "state_bytes" in first_notes(row) else "–"),
)


def build_section(run: str, seed: int, results: ClassIncrementalResults) -> PageSection:
    blocks = [build_method_table(results), build_plots(results), LEGEND]
    return PageSection(f"Classes {results['set']}: {run}, seed {seed}", blocks)


def build_plots(results: ClassIncrementalResults) -> list[PagePlot]:
    """Plot accuracies task after task, and A as a heat map: a row after each task, a column for each task."""
    name = results["set"]
    methods = [method for method in METHODS if method in results["methods"]]
    matrices = {x: np.array(results["methods"][x]["matrices"], dtype=np.float64).mean(0) for x in methods}
    curves = [
        PlotSeries(method, [(n, 100 * np.nanmean(row)) for n, row in enumerate(A, 1) if not np.isnan(row).all()])
        for method, A in matrices.items()
    ]
    plots = plot_lines(
        f"{name}, task after task",
        curves,
        "Accuracy on the examples of all tasks so far, among all classes so far; mean over orders.",
        x_label="tasks learned",
        y_label="accuracy (%)",
        y_scale="percent",
        alt_text=f"{name}, accuracy (%)",
    )
    caption = "Accuracy on a task (across) after a task (down), mean over orders."
    for method, A in matrices.items():
        if not np.isnan(A[0, 0]):
            numbers = [str(i + 1) for i in range(len(A))]
            last = ", ".join(f"{100 * x:.0f}" for x in A[-1])
            alt_text = f"{name}, {method}: accuracy in percent on each task at the end: {last}"
            image = plot_heat_maps([("", np.nan_to_num(A))], numbers, numbers, alt_text, value_range=(0.0, 1.0))
            plots.append(PagePlot(f"{name}, {method}", caption, image))
    return plots
