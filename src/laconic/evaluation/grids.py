"""Maps as SVG inside a page: cells by a scale of shades in the page's own colour, with words beside and above."""

from collections.abc import Sequence

from markupsafe import Markup, escape

LEVELS = 12  # shades
CELL = 18  # pixels from cell to cell
SIDE = ".94"  # of a cell, in cells
LETTER = 6.7  # pixels of a letter of the labels


def grid(
    values: Sequence[Sequence[float]],
    down: Sequence[str],
    across: Sequence[str],
    bounds: tuple[float, float],
    text: str,
    *,
    best: bool = False,
) -> Markup:
    """Cells between `bounds`, rows named by `down`, columns by `across`; `best` puts a dot on the largest of a row.

    `text` says what is drawn to those who do not see it.
    """
    left = 8 + LETTER * max((len(name) for name in down), default=0)
    top = 8 + LETTER * max((len(shown(name)) for name in across), default=0)
    width, height = left + CELL * len(across) + 2, top + CELL * len(down) + 2
    parts = [
        f'<svg class="cells" role="img" aria-label="{escape(text)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">'
    ]
    parts += [
        f'<text x="{left - 5:.0f}" y="{top + CELL * i + 13:.0f}" text-anchor="end">{escape(name)}</text>'
        for i, name in enumerate(down)
    ]
    parts += [
        f'<text transform="translate({left + CELL * i + 13:.0f} {top - 4:.0f}) rotate(-90)">{escape(name)}</text>'
        for i, name in enumerate(map(shown, across))
    ]
    parts += [f'<g transform="translate({left:.0f} {top + CELL / 2:.0f}) scale({CELL})" stroke-width="{SIDE}">']
    parts += [
        f'<path stroke-opacity="{level / LEVELS:.2f}" d="{cells}"/>'
        for level, cells in enumerate(shades(values, bounds))
        if cells and level
    ]
    parts += ["</g>"]
    if best:
        parts += [
            f'<circle cx="{left + CELL * (max(range(len(row)), key=row.__getitem__) + 0.5):.1f}" '
            f'cy="{top + CELL * (i + 0.5):.1f}" r="2.5"/>'
            for i, row in enumerate(values)
        ]
    return Markup("".join(parts) + "</svg>")


def shades(values: Sequence[Sequence[float]], bounds: tuple[float, float]) -> list[str]:
    """The cells of each shade as one path of short thick strokes, from none to full: a page holds 10⁵ of them."""
    low, high = bounds
    found = [""] * (LEVELS + 1)
    for i, row in enumerate(values):
        for j, x in enumerate(row):
            share = (x - low) / (high - low) if high > low else 0.0
            found[round(LEVELS * min(1.0, max(0.0, share)))] += f"M{j} {i}h{SIDE}"
    return found


def shown(word: str) -> str:
    """A token as a label: a space and a line end can be seen."""
    return word.replace(" ", "␣").replace("\n", "⏎") or "␣"


def bounds(maps: Sequence[Sequence[Sequence[float]]]) -> tuple[float, float]:
    """The least and the largest of all cells of maps that are to be compared."""
    cells = [x for map in maps for row in map for x in row]
    return (min(cells), max(cells)) if cells else (0.0, 1.0)
