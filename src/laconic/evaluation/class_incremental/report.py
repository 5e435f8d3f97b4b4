"""Class-incremental runs as a table, and drawn: accuracy while tasks come, and the matrix of each way to learn."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from laconic.evaluation.class_incremental.metrics import METRIC_NAMES, AccuracyRows
from laconic.evaluation.report import grids
from laconic.evaluation.report.old_plots import label_line_ends, percent_axes, series_color, to_svg

ClassIncrementalResults = Mapping[str, Any]  # what `recipe.incremental` gives
HEADER = ("method", "AA", "AA, all classes", "BWT", "forgetting", "plasticity", "AA, less prior", "updates", "state")
LEGEND = (
    "Per cent, mean over class orders, and its 95 % interval. AA: right on the test examples of all tasks at the end, "
    "among all classes met (all classes: among all of the set). forgetting: the best a task ever was, less what it is "
    "at the end. plasticity: right on a task when it had just been learned; who learns less has less to forget. "
    "less prior: the score of a label without the utterance is taken off. updates: of each level, fastest first."
)


def build_table(results: ClassIncrementalResults) -> list[list[str]]:
    """The table of a set: its header, and a row for each method."""
    made: list[list[str]] = [list(HEADER)]
    for name, own in results["methods"].items():
        seen, every = own["ways"]["seen"], own["ways"]["all"]
        rest = own["ways"].get("seen-prior")
        figures = [format_metric(seen["figures"].get(figure)) for figure in METRIC_NAMES[1:]]
        made.append(
            [name, format_metric(seen["figures"]["AA"]), format_metric(every["figures"]["AA"]), *figures,
             format_metric(rest["figures"]["AA"] if rest else None), format_updates(own["notes"]), format_state_bytes(own["notes"])]
        )  # fmt: skip
    return made


def format_metric(figure: Mapping[str, Any] | None) -> str:
    """A figure in per cent with its interval; a dash where there is none."""
    if figure is None:
        return "–"
    mean, low, high = (100 * figure[key] + 0.0 for key in ("mean", "low", "high"))
    return f"{mean:.1f}" if figure["sd"] is None else f"{mean:.1f} ({low:.1f} to {high:.1f})"


def format_updates(notes: Sequence[Mapping[str, Any]]) -> str:
    """Updates of each level in the first order."""
    updates = notes[0].get("updates", ()) if notes else ()
    return ", ".join(f"{n:,}" for n in updates) or "–"


def format_state_bytes(notes: Sequence[Mapping[str, Any]]) -> str:
    """Bytes of the state in the first order."""
    held = notes[0].get("state_bytes") if notes else None
    return "–" if held is None else f"{held:,}"


def build_figures(results: ClassIncrementalResults) -> list[tuple[str, str, Markup]]:
    """Title, what it shows, and the drawing; curves only with matplotlib (extra `report`)."""
    name, made = results["set"], list[tuple[str, str, Markup]]()
    for method, own in results["methods"].items():
        A = mean_matrix(own["ways"]["seen"]["matrices"])
        if A[0][0] is not None:
            text = "Right on a task (across) after a task (down), mean over orders."
            made.append((f"{name}, {method}", text, plot_matrix(name, method, A)))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return made
    text = "Right on the examples of all tasks so far, among all classes so far, mean over orders."
    return [(f"{name}, task after task", text, plot_curves(results)), *made]


def mean_matrix(matrices: Sequence[AccuracyRows]) -> AccuracyRows:
    """The mean of matrices, None where they have none."""
    rows = [list(zip(*same, strict=True)) for same in zip(*matrices, strict=True)]
    return [[mean_present(cell) for cell in row] for row in rows]


def mean_present(cell: Sequence[float | None]) -> float | None:
    """The mean of those that are there; None for none."""
    held = [x for x in cell if x is not None]
    return sum(held) / len(held) if held else None


def plot_matrix(name: str, method: str, A: AccuracyRows) -> Markup:
    """A map of A: rows after each task, columns tasks."""
    numbers = [str(i + 1) for i in range(len(A))]
    last = ", ".join(f"{100 * (x or 0):.0f}" for x in A[-1])
    text = f"{name}, {method}: per cent right on each task at the end: {last}"
    return grids.plot_heat_map([[x or 0.0 for x in row] for row in A], numbers, numbers, (0.0, 1.0), text)


def plot_curves(results: ClassIncrementalResults) -> Markup:
    """Mean of each row of A, by method."""
    figure, axes = percent_axes("tasks learned")
    ends: list[tuple[float, float, str, int]] = []
    for i, (method, own) in enumerate(results["methods"].items()):
        A = mean_matrix(own["ways"]["seen"]["matrices"])
        rows = [(n + 1, mean_present(row)) for n, row in enumerate(A)]
        shares = [(n, 100 * x) for n, x in rows if x is not None]
        axes.plot(
            *zip(*shares, strict=True), color=series_color(i), linewidth=1.6, marker="o" if len(shares) == 1 else None
        )
        ends.append((*shares[-1], method, i))
    axes.xaxis.get_major_locator().set_params(integer=True)
    label_line_ends(axes, ends)
    told = "; ".join(f"{method} {y:.0f} %" for _, y, method, _ in ends)
    return to_svg(figure, f"{results['set']}: right at the end: {told}.", f"classes-{results['set']}")
