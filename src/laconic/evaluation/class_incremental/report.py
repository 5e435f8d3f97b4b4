"""Table and plots of class-incremental results."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from laconic.evaluation.class_incremental.metrics import METRIC_NAMES, AccuracyRows
from laconic.evaluation.report.plots import PlotSeries, has_matplotlib, plot_heat_maps, plot_lines

ClassIncrementalResults = Mapping[str, Any]  # as `ClassIncrementalPlan.summarise` returns them
HEADER = ("method", "AA", "AA, all classes", "BWT", "forgetting", "plasticity", "AA, less prior", "updates", "state")
LEGEND = (
    "Percent, mean over class orders with 95 % interval. AA: accuracy on all tasks at the end, among the classes seen "
    "(all classes: among all of the set). forgetting: best accuracy on a task less the one at the end. plasticity: "
    "accuracy on a task right after it was learned; a method that learns less has less to forget. less prior: the "
    "score of a label without the utterance is subtracted. updates: of each level, fastest first. state: bytes."
)


def build_table(results: ClassIncrementalResults) -> list[list[str]]:
    """Return the header and one row for each method."""
    rows: list[list[str]] = [list(HEADER)]
    for name, method in results["methods"].items():
        metrics = {criterion: values["metrics"] for criterion, values in method["criteria"].items()}
        seen = metrics["seen"]
        first_notes = method["notes"][0] if method["notes"] else {}
        rows.append(
            [
                name,
                format_metric(seen["AA"]),
                format_metric(metrics["all"]["AA"]),
                *(format_metric(seen.get(metric)) for metric in METRIC_NAMES[1:]),
                format_metric(metrics.get("seen-prior", {}).get("AA")),
                ", ".join(f"{n:,}" for n in first_notes.get("updates", ())) or "–",
                f"{first_notes['state_bytes']:,}" if "state_bytes" in first_notes else "–",
            ]
        )
    return rows


def format_metric(metric: Mapping[str, Any] | None) -> str:
    """Return a metric in percent with its interval, or a dash."""
    if metric is None:
        return "–"
    mean, low, high = (100 * metric[key] + 0.0 for key in ("mean", "low", "high"))
    return f"{mean:.1f}" if metric["sd"] is None else f"{mean:.1f} ({low:.1f} to {high:.1f})"


def build_figures(results: ClassIncrementalResults) -> list[tuple[str, str, Markup]]:
    """Return title, description and plot of each figure; none without matplotlib."""
    if not has_matplotlib():
        return []
    name = results["set"]
    matrices = {
        method: mean_matrix(values["criteria"]["seen"]["matrices"]) for method, values in results["methods"].items()
    }
    text = "Accuracy on the examples of all tasks so far, among all classes so far; mean over orders."
    figures = [(f"{name}, task after task", text, plot_curves(name, matrices))]
    text = "Accuracy on a task (across) after a task (down), mean over orders."
    figures += [
        (f"{name}, {method}", text, plot_matrix(name, method, A))
        for method, A in matrices.items()
        if A[0][0] is not None
    ]
    return figures


def mean_matrix(matrices: Sequence[AccuracyRows]) -> AccuracyRows:
    """Return the mean of accuracy matrices; None where they have none."""
    rows = [list(zip(*same_row, strict=True)) for same_row in zip(*matrices, strict=True)]
    return [[mean_present(cell) for cell in row] for row in rows]


def mean_present(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    present = [x for x in values if x is not None]
    return sum(present) / len(present) if present else None


def plot_matrix(name: str, method: str, A: AccuracyRows) -> Markup:
    """Plot A as a heat map: a row after each task, a column for each task."""
    numbers = [str(i + 1) for i in range(len(A))]
    last = ", ".join(f"{100 * (x or 0):.0f}" for x in A[-1])
    alt_text = f"{name}, {method}: accuracy in percent on each task at the end: {last}"
    values = [[x or 0.0 for x in row] for row in A]
    return plot_heat_maps([("", values)], numbers, numbers, alt_text, value_range=(0.0, 1.0))


def plot_curves(name: str, matrices: Mapping[str, AccuracyRows]) -> Markup:
    """Plot the mean of each row of A by method."""
    series: list[PlotSeries] = []
    for i, (method, A) in enumerate(matrices.items()):
        means = [(n, mean_present(row)) for n, row in enumerate(A, 1)]
        points = [(float(n), 100 * mean) for n, mean in means if mean is not None]
        series.append(PlotSeries(method, points, color=i))
    return plot_lines(
        series, x_label="tasks learned", y_label="accuracy (%)", alt_text=f"{name}, accuracy (%)", is_percent=True
    )
