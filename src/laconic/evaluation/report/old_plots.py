"""Curves and sweeps as SVG inside the page, in its own colours, so that they follow light and dark."""

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from laconic.evaluation.report.runs_table import MethodResult

# Light and dark by the order of lines: told apart by those who do not see red and green as two (after Okabe and Ito).
COLORS = (
    ("#1b1f24", "#e6e9ed"),
    ("#8a5a00", "#e6a532"),
    ("#767f8a", "#98a2ad"),
    ("#0f766e", "#4cc3b5"),
    ("#9a3f8f", "#de8fd4"),
    ("#1f5fd0", "#78a9ff"),
    ("#b3441e", "#ff9466"),
    ("#4d7c0f", "#a3d65c"),
)
TEXT_COLOR, GRID_COLOR = "#0a0b0c", "#0d0e0f"  # stand-ins that become the page's own


def series_color(i: int) -> str:
    """The stand-in of a line's colour."""
    return f"#0c{i % len(COLORS):02x}fe"


def plot_results(results: Sequence["MethodResult"], floor: float) -> list[tuple[str, str, Markup]]:
    """Title, what it shows, and the drawing; none without matplotlib (extra `report`) or without anything to draw."""
    if not has_matplotlib():
        return []
    made: list[tuple[str, str, Markup]] = []
    if any(line.learning_curves for line in results):
        text = "Share right on validation problems, one line a seed."
        made.append(("While they learn", text, plot_learning_curves(results, floor)))
    if any(len(line.iteration_sweep) > 1 for line in results):
        text = "The trained model in fewer or more rounds; ring: as trained."
        made.append(("Rounds at test time", text, plot_iteration_sweep(results, floor)))
    return made


def plot_learning_curves(results: Sequence["MethodResult"], floor: float) -> Markup:
    """Accuracy over training steps."""
    figure, axes = percent_axes("training steps")
    ends: list[tuple[float, float, str, int]] = []
    for line in results:
        i = line.color_index
        for curve in line.learning_curves:
            steps, shares = np.array(curve).T
            axes.plot(steps, 100 * shares, color=series_color(i), linewidth=1.6)
        if any(line.learning_curves):
            last = [curve[-1] for curve in line.learning_curves if curve]
            ends.append((max(x for x, _ in last), 100 * float(np.mean([y for _, y in last])), line.title, i))
    draw_floor(axes, floor)
    label_line_ends(axes, ends)
    told = "; ".join(f"{title} ends at {y:.0f} %" for _, y, title, _ in ends)
    return to_svg(figure, f"Share right over training steps. {told}.", "curves")


def plot_iteration_sweep(results: Sequence["MethodResult"], floor: float) -> Markup:
    """Accuracy over test-time rounds."""
    figure, axes = percent_axes("rounds of thinking, T")
    ends: list[tuple[float, float, str, int]] = []
    told: list[str] = []
    for line in results:
        i = line.color_index
        if len(line.iteration_sweep) < 2:
            continue
        rounds = sorted(line.iteration_sweep)
        shares = [100 * float(np.mean(line.iteration_sweep[t])) for t in rounds]
        axes.plot(rounds, shares, color=series_color(i), linewidth=1.6, marker="o", markersize=3.5, clip_on=False)
        if line.trained_iterations is not None and line.trained_iterations in line.iteration_sweep:
            at = 100 * float(np.mean(line.iteration_sweep[line.trained_iterations]))
            axes.plot(
                [line.trained_iterations],
                [at],
                "o",
                markersize=10,
                markerfacecolor="none",
                markeredgecolor=series_color(i),
                clip_on=False,
            )
        ends.append((rounds[-1], shares[-1], line.title, i))
        told.append(f"{line.title}: " + ", ".join(f"T={t} {y:.0f} %" for t, y in zip(rounds, shares, strict=True)))
    axes.xaxis.get_major_locator().set_params(integer=True)
    draw_floor(axes, floor)
    label_line_ends(axes, ends)
    return to_svg(figure, f"Share right by test-time rounds. {'; '.join(told)}.", "sweep")


def has_matplotlib() -> bool:
    """Whether matplotlib is there (extra `report`)."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def new_axes(
    x_label: str,
    y_label: str | None,
    size: tuple[float, float] = (5.6, 3.4),
    area: tuple[float, float, float, float] = (0.13, 0.14, 0.85, 0.82),
) -> tuple[Any, Any]:
    """An empty plot in the page's colours: its size in inches, and left, bottom, width and height of the axes in it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    axes = figure.add_axes(area)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID_COLOR)
    axes.grid(axis="y", color=GRID_COLOR, linewidth=0.6)
    axes.tick_params(which="both", colors=TEXT_COLOR, labelsize=9, length=0)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, color=TEXT_COLOR, fontsize=9)
    if y_label is not None:
        axes.set_ylabel(y_label, color=TEXT_COLOR, fontsize=9)
    return figure, axes


def percent_axes(x_label: str) -> tuple[Any, Any]:
    """An empty plot, 0 to 100 %, with room for names at its right edge."""
    figure, axes = new_axes(x_label, None, (5.2, 3.3), (0.088, 0.14, 0.59, 0.82))
    axes.set_ylim(0, 102)
    axes.set_yticks(range(0, 101, 20), [f"{y} %" if y == 100 else str(y) for y in range(0, 101, 20)])
    return figure, axes


def draw_floor(axes: Any, floor: float) -> None:
    """The majority floor."""
    axes.axhline(100 * floor, color=TEXT_COLOR, linewidth=0.9, linestyle=(0, (2, 3)))


def label_line_ends(axes: Any, ends: Sequence[tuple[float, float, str, int]]) -> None:
    """The name of each line in its colour behind the plot, at the height of its end, pushed apart where too near."""
    gap, top = 6.2, 99.0
    heights: list[float] = []
    order = sorted(ends, key=lambda end: end[1], reverse=True)
    for _, y, _, _ in order:
        heights.append(min(y, top) if not heights else min(y, heights[-1] - gap))
    low = 1.5 - min(heights, default=1.5)
    for n in range(len(heights) - 1, -1, -1):  # what fell below the axis goes up again, and pushes those above it
        heights[n] = heights[n] + max(0.0, low) if n == len(heights) - 1 else max(heights[n], heights[n + 1] + gap)
    for (_, y, title, i), height in zip(order, heights, strict=True):
        axes.annotate(
            f"{title} {y:.0f}", (1.0, y), xytext=(1.02, height), xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"), color=series_color(i), fontsize=9.5, va="center", annotation_clip=False,
        )  # fmt: skip


def to_svg(figure: Any, alt_text: str, id_prefix: str) -> Markup:
    """The drawing as an element with its text for those who do not see it; the same figure gives the same bytes."""
    import matplotlib as mpl

    held = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": id_prefix}):
        figure.savefig(held, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = held.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    for side in ("width", "height"):
        drawn = re.sub(rf'(<svg[^>]*?) {side}="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r' xmlns(:xlink)?="[^"]*"', "", drawn)
    drawn = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", drawn)
    drawn = re.sub(r'\bid="([^"]*)"', rf'id="{id_prefix}-\1"', drawn)
    drawn = re.sub(r'(xlink:)?href="#([^"]*)"', rf'href="#{id_prefix}-\2"', drawn)
    drawn = re.sub(r"url\(#([^)]*)\)", rf"url(#{id_prefix}-\1)", drawn)
    for i in range(len(COLORS)):
        drawn = drawn.replace(series_color(i), f"var(--s{i})")
    drawn = drawn.replace(TEXT_COLOR, "var(--soft)").replace(GRID_COLOR, "var(--line)")
    return Markup(drawn.replace("<svg", f'<svg role="img" aria-label="{escape(alt_text)}"', 1).strip())
