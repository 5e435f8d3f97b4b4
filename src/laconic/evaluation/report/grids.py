"""Maps as SVG inside a page: cells by a scale of shades in the page's own colour, with words beside and above."""

from collections.abc import Sequence

from markupsafe import Markup, escape

NUM_SHADES = 12  # shades
CELL_PIXELS = 18  # pixels from cell to cell
CELL_FILL = ".94"  # of a cell, in cells
LETTER_PIXELS = 6.7  # pixels of a letter of the labels


def plot_heat_map(
    values: Sequence[Sequence[float]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    value_range: tuple[float, float],
    alt_text: str,
    *,
    mark_max: bool = False,
) -> Markup:
    """Cells between `bounds`, rows named by `down`, columns by `across`; `best` puts a dot on the largest of a row.

    `text` says what is drawn to those who do not see it.
    """
    left = 8 + LETTER_PIXELS * max((len(name) for name in row_labels), default=0)
    top = 8 + LETTER_PIXELS * max((len(show_whitespace(name)) for name in column_labels), default=0)
    width, height = left + CELL_PIXELS * len(column_labels) + 2, top + CELL_PIXELS * len(row_labels) + 2
    parts = [
        f'<svg class="cells" role="img" aria-label="{escape(alt_text)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">'
    ]
    parts += [
        f'<text x="{left - 5:.0f}" y="{top + CELL_PIXELS * i + 13:.0f}" text-anchor="end">{escape(name)}</text>'
        for i, name in enumerate(row_labels)
    ]
    parts += [
        f'<text transform="translate({left + CELL_PIXELS * i + 13:.0f} {top - 4:.0f}) rotate(-90)">{escape(name)}</text>'
        for i, name in enumerate(map(show_whitespace, column_labels))
    ]
    parts += [
        f'<g transform="translate({left:.0f} {top + CELL_PIXELS / 2:.0f}) scale({CELL_PIXELS})" stroke-width="{CELL_FILL}">'
    ]
    parts += [
        f'<path stroke-opacity="{level / NUM_SHADES:.2f}" d="{cells}"/>'
        for level, cells in enumerate(shade_paths(values, value_range))
        if cells and level
    ]
    parts += ["</g>"]
    if mark_max:
        parts += [
            f'<circle cx="{left + CELL_PIXELS * (max(range(len(row)), key=row.__getitem__) + 0.5):.1f}" '
            f'cy="{top + CELL_PIXELS * (i + 0.5):.1f}" r="2.5"/>'
            for i, row in enumerate(values)
        ]
    return Markup("".join(parts) + "</svg>")


def shade_paths(values: Sequence[Sequence[float]], bounds: tuple[float, float]) -> list[str]:
    """The cells of each shade as one path of short thick strokes, from none to full: a page holds 10⁵ of them."""
    low, high = bounds
    found = [""] * (NUM_SHADES + 1)
    for i, row in enumerate(values):
        for j, x in enumerate(row):
            share = (x - low) / (high - low) if high > low else 0.0
            found[round(NUM_SHADES * min(1.0, max(0.0, share)))] += f"M{j} {i}h{CELL_FILL}"
    return found


def show_whitespace(word: str) -> str:
    """A token as a label: a space and a line end can be seen."""
    return word.replace(" ", "␣").replace("\n", "⏎") or "␣"


def find_value_range(maps: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """The least and the largest of all cells of maps that are to be compared."""
    cells = [x for map in maps for row in map for x in row]
    return (min(cells), max(cells)) if cells else (0.0, 1.0)
