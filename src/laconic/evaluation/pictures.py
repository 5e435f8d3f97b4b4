"""What is drawn on the page on runs that read: quality against vectors, and nats along the tail."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from laconic.evaluation.contexts import TUNED, UNTRAINED, column, curve, ways_of
from laconic.evaluation.drawings import canvas, svg, tint
from laconic.evaluation.pareto import END, FIXED, LEARNED, ORACLE, Point
from laconic.evaluation.reading import Line
from laconic.evaluation.scored import WIDTH

KINDS = (FIXED, LEARNED, END, ORACLE)
WORDS = {
    "none": "no context",
    "full": "whole text",
    TUNED: "whole text, full-tuned",
    f"{UNTRAINED} none": f"no context, {UNTRAINED}",
}
MARKS = {FIXED: ("o", "-"), LEARNED: ("D", "none"), END: (".", ":"), ORACLE: (".", "--")}
ACROSS = {"full": (0, (6, 3)), TUNED: (0, (6, 2, 1, 2))}


class Key(NamedTuple):
    """A series of a picture, for its legend."""

    title: str
    tint: int
    kind: str


def words(way: str) -> str:
    """What a way is called on the page."""
    return WORDS.get(way, way)


def legend(found: Sequence[Point], runs: Sequence[str], lines: Sequence[Line]) -> list[Key]:
    """The series of the picture."""
    keys = [
        Key(f"{run}: {kind}", runs.index(run), kind)
        for run in runs
        for kind in KINDS
        if any(p.run == run and p.kind == kind for p in found)
    ]
    keys += [Key(f"{line.run}: {words(way)}", runs.index(line.run), way) for line in lines for way, _ in levels(line)]
    return keys


def levels(line: Line) -> list[tuple[str, float]]:
    """What the whole text is worth to a run, and to the plain model beside it: lines across the picture."""
    there = [] if line.facts else [way for way in (TUNED, "full") if way in ways_of(line.rows)]
    return [(way, float(column(line.rows, way).mean())) for way in there]


def picture(found: Sequence[Point], runs: Sequence[str], lines: Sequence[Line], i: int) -> Markup:
    """Quality against vectors; up is better."""
    facts = lines[0].facts
    figure, axes = canvas("vectors of a segment, mean", "right, %" if facts else "nats a token, down is worse")
    told: list[str] = []
    for run in runs:
        for kind in KINDS:
            some = sorted((p for p in found if p.run == run and p.kind == kind), key=lambda p: p.at)
            if not some:
                continue
            x = [p.at[0] for p in some]
            y = [100 * p.at[1] if facts else -p.at[1] for p in some]
            marker, line = MARKS[kind]
            axes.plot(
                x, y, marker=marker, linestyle=line, markersize=7 if kind == LEARNED else 4, linewidth=1.4,
                color=tint(runs.index(run)), markerfacecolor="none" if kind == LEARNED else tint(runs.index(run)),
                markeredgecolor=tint(runs.index(run)),
            )  # fmt: skip
            told.append(f"{run}, {kind}: " + ", ".join(f"{a:.1f} vectors {b:.3g}" for a, b in zip(x, y, strict=True)))
    for line in lines:
        for way, y in levels(line):
            axes.axhline(y, color=tint(runs.index(line.run)), linestyle=ACROSS[way], linewidth=1)
            told.append(f"{line.run}, {words(way)}: {y:.3g}")
    if not facts:
        axes.invert_yaxis()
    return svg(figure, "Quality by vectors of a segment. " + "; ".join(told), f"pareto-{i}")


def positions(lines: Sequence[Line], number: int) -> Markup:
    """Nats a token along the tail, with no context, compressed, and as the whole text."""
    figure, axes = canvas("tokens of the tail", "nats a token")
    styles = {"none": ":", "compressed": "-", "full": "--"}
    for i, line in enumerate(lines):
        for way, style in styles.items():
            if way in ways_of(line.rows):
                y = curve(line.rows, way)
                axes.plot([WIDTH * (k + 0.5) for k in range(len(y))], y, linestyle=style, linewidth=1.5, color=tint(i))
    return svg(
        figure,
        "Nats a token by position in the tail: dotted without context, solid compressed, dashed whole text",
        f"along-{number}",
    )
