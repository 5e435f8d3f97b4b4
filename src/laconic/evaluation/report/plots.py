"""Plots for HTML pages: matplotlib figures as SVG images in a light and a dark version (extra `report`).

A page shows the version that fits the reader's colour scheme. The same data gives the same bytes. Without matplotlib, a
plot is a sentence that says so.
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike

from laconic.evaluation.report.page import PagePlot

STYLE_SHEET = Path(__file__).with_name("laconic.mplstyle")
# Distinguishable with red-green colour blindness (after Okabe and Ito), as is the light cycle in the style sheet.
DARK_CYCLE = ("e6e9ed", "e6a532", "98a2ad", "4cc3b5", "de8fd4", "78a9ff", "ff9466", "a3d65c")
DARK_TEXT, DARK_LINE = "9aa4b0", "363d46"
NEUTRAL_TEXT = "#7d8793"  # readable on light and dark
NUM_COLORS = len(DARK_CYCLE)
CELL_INCHES, LETTER_INCHES = 0.19, 0.085
LEGEND_COLUMNS = 2
LINE_STYLES = ("-", "--", ":", "-.")  # the first for as many lines as there are colours, then the next
MAX_ROW_LABELS = 24
TITLE_ROWS = 2
NO_PLOTS = Markup.escape("Plots need matplotlib: in a clone of laconic, pip install '.[report]'.")
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class PlotSeries:
    """One line of a plot: (x, y) points; `color` is its place in the colour cycle, by default that among the lines."""

    label: str
    points: Points
    color: int | None = None
    linestyle: str | None = None
    marker: str | None = None


def render_plot(draw: Callable[[Any], None], alt_text: str, size: tuple[float, float] = (5.6, 3.4)) -> Markup:
    """Draw a figure for light and for dark pages, as a `<picture>` element with both images embedded.

    `draw` is called with an empty matplotlib `Figure`, once for each colour scheme. The size is in inches.
    """
    if find_spec("matplotlib") is None:
        return NO_PLOTS
    light, dark = (_to_data_uri(draw, size, "constrained", colors) for colors in ({}, _dark_colors()))
    image = _image_tag(light, alt_text, size)
    return Markup(f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">{image}</picture>')


def plot_lines(
    title: str,
    series: Sequence[PlotSeries],
    caption: str = "",
    *,
    x_label: str,
    y_label: str = "",
    y_scale: Literal["linear", "log", "percent"] = "linear",
    alt_text: str | None = None,
    floor: float | None = None,
) -> list[PagePlot]:
    """Return a plot of lines with a legend; lines without points are left out, and a plot without lines.

    The last value of each line is appended to the alternative text, by default the title. A logarithmic y axis needs
    values above 0, else it is linear; percentages go from 0 to 100. `floor` is the height of a dashed reference line.
    """
    visible = [line for line in series if line.points]
    if not visible:
        return []

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, line in enumerate(visible):
            x, y = np.array(sorted(line.points)).T
            color = f"C{i if line.color is None else line.color}"
            linestyle = line.linestyle or LINE_STYLES[i // NUM_COLORS % len(LINE_STYLES)]
            marker = line.marker or ("o" if len(x) < 12 else "")
            axes.plot(x, y, color=color, linestyle=linestyle, marker=marker, label=line.label)
        if floor is not None:
            axes.axhline(floor, color=axes.xaxis.label.get_color(), linewidth=0.9, linestyle=(0, (2, 3)))
        if y_scale == "log" and all(y > 0 for line in visible for _, y in line.points):
            axes.set_yscale("log")
        if y_scale == "percent":
            axes.set_ylim(-2, 102)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel=x_label, ylabel=y_label)
        figure.legend(loc="outside lower left", ncols=LEGEND_COLUMNS)

    ends = "; ".join(f"{line.label} ends at {sorted(line.points)[-1][1]:.4g}" for line in visible)
    height = 3.2 + 0.17 * -(-len(visible) // LEGEND_COLUMNS)
    return [PagePlot(title, caption, render_plot(draw, f"{alt_text or title}: {ends}.", (5.6, height)))]


def plot_accuracies(bars: Sequence[tuple[str, float, float, float, int]], floor: float) -> Markup:
    """Draw accuracies in percent as horizontal bars with intervals, and a dashed reference line at `floor`.

    A bar has a label, its value, the lower and upper end of the interval, and its place in the colour cycle.
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for i, (label, value, low, high, color) in enumerate(bars):
            axes.barh(i, value, height=0.6, color=f"C{color}", label=label)
            axes.plot([low, high], [i, i], color=axes.xaxis.label.get_color(), linewidth=2.5)
        axes.set_yticks(range(len(bars)), [label for label, *_ in bars])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xlabel("accuracy, %")
        axes.axvline(floor, color=axes.xaxis.label.get_color(), linewidth=0.9, linestyle=(0, (2, 3)))

    values = ", ".join(f"{label} {value:.4g}" for label, value, *_ in bars)
    return render_plot(draw, f"Accuracy: {values}.", (5.6, 0.7 + 0.3 * len(bars)))


def plot_heat_maps(
    panels: Sequence[tuple[str, ArrayLike]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    alt_text: str,
    *,
    value_range: tuple[float, float] | None = None,
    mark_max: bool = False,
) -> Markup:
    """Draw heat maps with common labels, one under the other, for light and dark pages.

    A panel has a title and values [rows, columns], at most as many as labels; column labels stand over the first map.
    `value_range` has the values of the lightest and the darkest cell; None scales each map by itself. `mark_max` puts a
    dot on the largest cell of each row.
    """
    columns = [show_whitespace(label) for label in column_labels]
    longest = (max(map(len, labels), default=0) for labels in (row_labels, columns, [title for title, _ in panels]))
    left, top, title_width = (LETTER_INCHES * letters for letters in longest)
    left, top = left + 0.25, top + 0.25
    num_rows = len(row_labels) + TITLE_ROWS
    every = 1 + len(row_labels) // MAX_ROW_LABELS
    # All maps are one image, with empty rows for the titles: an axes for each map would take many times as long.
    image = np.full((len(panels) * num_rows, len(columns)), np.nan)
    for i, (_, values) in enumerate(panels):
        cells = np.asarray(values, dtype=float)
        low, high = value_range or (cells.min(), cells.max())
        rows = (cells - low) / max(high - low, 1e-9)
        image[i * num_rows + TITLE_ROWS :][: len(rows), : rows.shape[1]] = rows.clip(0, 1)
    map_width, map_height = CELL_INCHES * image.shape[1], CELL_INCHES * image.shape[0]
    width = left + max(map_width, title_width) + 0.1
    height = top + map_height + 0.1

    def draw(figure: Any) -> None:
        axes = figure.add_axes((left / width, 0.05 / height, map_width / width, map_height / height))
        axes.imshow(image, vmin=0, vmax=1, aspect="auto", interpolation="none")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        starts = [i * num_rows + TITLE_ROWS for i in range(len(panels))]
        labelled = [(start + i, label) for start in starts for i, label in list(enumerate(row_labels))[::every]]
        axes.set_yticks([y for y, _ in labelled], [label for _, label in labelled])
        axes.set_xticks(range(len(columns)), columns, rotation=90)
        axes.xaxis.tick_top()
        for start, (title, values) in zip(starts, panels, strict=True):
            axes.text(-0.5, start - 0.7, title)
            if mark_max:
                best = np.argmax(np.asarray(values), axis=1)
                axes.plot(best, start + np.arange(len(best)), "o", color="C6", markersize=3)
        axes.set(xlim=(-0.5, image.shape[1] - 0.5), ylim=(image.shape[0] - 0.5, -0.5))

    if find_spec("matplotlib") is None:
        return NO_PLOTS
    # Neutral text and a colour map for both schemes: a page may have hundreds of maps, and drawing them twice is slow.
    text = dict.fromkeys(("text.color", "xtick.color", "ytick.color"), NEUTRAL_TEXT)
    uri = _to_data_uri(draw, (width, height), "none", text | {"image.cmap": "viridis"})
    return _image_tag(uri, alt_text, (width, height))


def show_whitespace(token: str) -> str:
    return token.replace(" ", "␣").replace("\n", "⏎") or "␣"


def _image_tag(uri: str, alt_text: str, size: tuple[float, float]) -> Markup:
    width, height = (f"{96 * inches:.0f}" for inches in size)
    return Markup('<img src="{}" alt="{}" width="{}" height="{}">').format(Markup(uri), alt_text, width, height)


def _dark_colors() -> dict[str, Any]:
    from cycler import cycler

    text = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), f"#{DARK_TEXT}")
    lines = dict.fromkeys(("axes.edgecolor", "grid.color"), f"#{DARK_LINE}")
    return text | lines | {"axes.prop_cycle": cycler(color=[f"#{color}" for color in DARK_CYCLE])}


def _to_data_uri(draw: Callable[[Any], None], size: tuple[float, float], layout: Any, colors: Any) -> str:
    """Draw a figure with the style sheet and some colours, and return it as a data URI."""
    import matplotlib as mpl
    from matplotlib import style
    from matplotlib.figure import Figure

    with mpl.rc_context(), style.context(STYLE_SHEET):
        mpl.rcParams.update(colors)
        figure = Figure(figsize=size, layout=layout)
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
