"""Plots for HTML pages: matplotlib figures as SVG images in a light and a dark version (extra `report`).

A page shows the version that fits the reader's colour scheme. The same data gives the same bytes.
"""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup, escape

STYLE_SHEET = Path(__file__).with_name("laconic.mplstyle")
# Colour cycles for both schemes, distinguishable without red-green vision (after Okabe and Ito).
DARK_CYCLE = ("e6e9ed", "e6a532", "98a2ad", "4cc3b5", "de8fd4", "78a9ff", "ff9466", "a3d65c")
DARK_TEXT, DARK_LINE = "9aa4b0", "363d46"
NUM_COLORS = len(DARK_CYCLE)
CELL_INCHES = 0.19
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class PlotSeries:
    """One line of a plot: (x, y) points; `color` is its place in the colour cycle.

    `lower` and `upper`, if given, are the ends of an interval around each point.
    """

    label: str
    points: Points
    color: int = 0
    linestyle: str = "-"
    marker: str | None = None


def has_matplotlib() -> bool:
    """Return whether plots can be drawn (extra `report`)."""
    return find_spec("matplotlib") is not None


def render_plot(
    draw: Callable[[Any], None], alt_text: str, size: tuple[float, float] = (5.6, 3.4), layout: Any = "constrained"
) -> Markup:
    """Draw a figure for light and dark pages.

    Args:
        draw: Called with an empty matplotlib `Figure`, once for each colour scheme.
        alt_text: What the plot shows, for readers who cannot see it.
        size: Width and height in inches.
        layout: Matplotlib's layout engine.

    Returns:
        A `<picture>` element with both images embedded.
    """
    light, dark = (_to_data_uri(draw, size, layout, is_dark) for is_dark in (False, True))
    return Markup(
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(alt_text)}" width="{96 * size[0]:.0f}" height="{96 * size[1]:.0f}"></picture>'
    )


def plot_lines(
    series: Sequence[PlotSeries],
    *,
    x_label: str,
    y_label: str,
    alt_text: str,
    is_log: bool = False,
    is_percent: bool = False,
    floor: float | None = None,
) -> Markup:
    """Draw lines with a legend.

    Args:
        series: The lines; those without points are left out.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        alt_text: Title for readers who cannot see the plot; the last value of each line is appended.
        is_log: Use a logarithmic y axis if all values are positive.
        is_percent: The y axis goes from 0 to 100.
        floor: Height of a dashed reference line.
    """
    shown = [line for line in series if line.points]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for line in shown:
            x, y = np.array(sorted(line.points)).T
            marker = line.marker or ("o" if len(x) < 12 else "")
            style = "none" if line.linestyle == "none" else line.linestyle
            axes.plot(x, y, color=f"C{line.color}", linestyle=style, marker=marker, label=line.label)
        if floor is not None:
            axes.axhline(floor, color=axes.xaxis.label.get_color(), linewidth=0.9, linestyle=(0, (2, 3)))
        if is_log and all(y > 0 for line in shown for _, y in line.points):
            axes.set_yscale("log")
        if is_percent:
            axes.set_ylim(-2, 102)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))

    ends = "; ".join(f"{line.label} ends at {sorted(line.points)[-1][1]:.4g}" for line in shown)
    return render_plot(draw, f"{alt_text}: {ends}.", (7.4, 3.4))


def plot_heat_maps(
    panels: Sequence[tuple[str, Sequence[Sequence[float]]]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    alt_text: str,
    *,
    value_range: tuple[float, float] | None = None,
    mark_max: bool = False,
) -> Markup:
    """Draw heat maps with common labels, one under the other.

    Args:
        panels: Title and values [rows, columns] of each map.
        row_labels: Labels of the rows.
        column_labels: Labels of the columns, shown over the first map.
        alt_text: What the maps show, for readers who cannot see them.
        value_range: Values of the lightest and the darkest cell; None scales each map by itself.
        mark_max: Put a dot on the largest cell of each row.
    """
    columns = [show_whitespace(label) for label in column_labels]
    left, top = (0.15 + 0.085 * max(map(len, labels), default=0) for labels in (row_labels, columns))
    map_width, map_height = CELL_INCHES * len(columns), CELL_INCHES * len(row_labels)
    width, height = left + map_width + 0.1, top + 0.3 * (len(panels) > 0) + len(panels) * (map_height + 0.3)

    def draw(figure: Any) -> None:
        for i, (title, values) in enumerate(panels):
            bottom = (len(panels) - i - 1) * (map_height + 0.3) + 0.05
            area = (left / width, bottom / height, map_width / width, map_height / height)
            low, high = value_range or find_value_range([values])
            axes = figure.add_axes(area)
            axes.imshow(np.asarray(values, dtype=float), vmin=low, vmax=max(high, low + 1e-9), aspect="auto")
            axes.grid(visible=False)
            axes.set_yticks(range(len(row_labels)), row_labels)
            axes.set_xticks(range(len(columns)) if i == 0 else (), columns if i == 0 else (), rotation=90)
            axes.xaxis.tick_top()
            axes.set_title(title, loc="left", y=1, pad=top * 72 if i == 0 else 4)
            if mark_max:
                best = np.argmax(np.asarray(values), axis=1)
                axes.plot(best, range(len(best)), "o", color="C6", markersize=3)

    return render_plot(draw, alt_text, (width, height), layout="none")


def find_value_range(maps: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """Return the least and the largest value of maps that are to be compared."""
    cells = [x for values in maps for row in values for x in row]
    return (min(cells), max(cells)) if cells else (0.0, 1.0)


def show_whitespace(token: str) -> str:
    """Make spaces and line ends of a token visible."""
    return token.replace(" ", "␣").replace("\n", "⏎") or "␣"


def _to_data_uri(draw: Callable[[Any], None], size: tuple[float, float], layout: Any, is_dark: bool) -> str:
    """Draw a figure in one colour scheme and return it as a data URI."""
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib import style
    from matplotlib.figure import Figure

    text, line = f"#{DARK_TEXT}", f"#{DARK_LINE}"
    dark: Any = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), text),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), line),
        "axes.prop_cycle": cycler(color=[f"#{color}" for color in DARK_CYCLE]),
        "image.cmap": "Blues_r",
    }
    with mpl.rc_context(), style.context(STYLE_SHEET):
        if is_dark:
            mpl.rcParams.update(dark)
        figure = Figure(figsize=size, layout=layout)
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
