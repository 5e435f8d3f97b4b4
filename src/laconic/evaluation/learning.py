"""The page on runs that learn while they read: streams, books, classes, levels in training, and papers beside."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from laconic.evaluation import classes_shown, drawings, reported_learning, stream_table
from laconic.evaluation.drawings import canvas, drawable, svg, tint
from laconic.evaluation.pages import template
from laconic.evaluation.report import FEW
from laconic.evaluation.stream_table import Measured, column, figures

STYLES = ("-", "--", ":", "-.")
SAID = (
    "Forgetting is not solved: a level that changes slowly keeps longer, and loses too.",
    "Figures of papers are of other sizes, texts and budgets than tiny runs: beside, not against.",
    "A needle here is RULER-like and fuzzy recall MAD-like: neither is the published task.",
    "Depth, chunk sizes and the objective of levels are not printed in the paper; ours are choices.",
)
IN_TRAINING = (  # ends of names in the metrics, what is drawn up, title, text
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
Course = Mapping[str, Sequence[tuple[float, float]]]  # (step, number) of each name in a run's metrics


class Drawn(NamedTuple):
    """A picture with its title, what it shows, and the names of its lines in their order."""

    title: str
    text: str
    picture: Markup
    keys: Sequence[str]


class Group(NamedTuple):
    """Classes of one run and seed: the table, and pictures."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    pictures: Sequence[tuple[str, str, Markup]]


def ranged(line: Measured, way: str) -> list[tuple[float, float]]:
    """(lower end, score) of the cells LOW-HIGH of a way: nats by how much was read."""
    found = [
        (int(each.cell.partition("-")[0]), each.estimate.mean)
        for each in figures(line, way)
        if each.cell.replace("-", "").isdigit()
    ]
    return sorted(found)


def gaps(line: Measured, way: str) -> dict[str, list[tuple[float, float]]]:
    """Of each number of pairs, (gap, share right) of a way."""
    found: dict[str, list[tuple[float, float]]] = {}
    for each in figures(line, way):
        pairs, _, gap = each.cell.partition(", gap ")
        if gap:
            found.setdefault(pairs, []).append((float(gap.partition("-")[0]), 100 * each.estimate.mean))
    return {pairs: sorted(points) for pairs, points in found.items()}


def drawn(series: Sequence[tuple[str, Sequence[tuple[float, float]]]], across: str, up: str, title: str, text: str,
          *, log: bool = False, percent: bool = False) -> Drawn | None:  # fmt: skip
    """Lines by name, in the page's colours; None where there is nothing to draw."""
    told = [(name, points) for name, points in series if points]
    if not told:
        return None
    figure, axes = canvas(across, up)
    for i, (_, points) in enumerate(told):
        x, y = np.array(points).T
        style = STYLES[i // len(drawings.COLOURS) % len(STYLES)]
        axes.plot(x, y, color=tint(i), linestyle=style, linewidth=1.6, marker="o" if len(x) < 12 else None,
                  markersize=3.5)  # fmt: skip
    if log and all(y > 0 for _, points in told for _, y in points):
        axes.set_yscale("log")
    if percent:
        axes.set_ylim(-2, 102)
    said = "; ".join(f"{name} ends at {points[-1][1]:.4g}" for name, points in told)
    return Drawn(title, text, svg(figure, f"{title}: {said}.", title.replace(" ", "-")), [name for name, _ in told])


def by_position(lines: Sequence[Measured]) -> Drawn | None:
    """Nats by how much was read, carried and reset."""
    series = [(f"{x.run}, {way}", ranged(x, way)) for x in lines if x.stream.startswith("ppl") for way in x.ways]
    text = "Texts read in order. Reset: every stretch begins anew; still: nothing learns."
    return drawn(series, "tokens read before", "nats a token", "Nats by position", text)


def by_gap(lines: Sequence[Measured]) -> Drawn | None:
    """Recall by the distance from a pair to its query."""
    series = [(f"{x.run}, {way}, {pairs}", points) for x in lines if x.stream.startswith("mqar") for way in x.ways
              for pairs, points in gaps(x, way).items()]  # fmt: skip
    return drawn(series, "tokens from a pair to its query, at least", "right, %", "Recall by gap",
                 "Still: nothing learns, so that only chance is left.", percent=True)  # fmt: skip


def in_training(courses: Sequence[tuple[str, Course]]) -> list[Drawn]:
    """What the metrics say of levels and memories, over the steps of training."""
    made: list[Drawn | None] = []
    for ends, up, title, text in IN_TRAINING:
        series = [
            (f"{run}, {labelled(name, ends)}", points)
            for run, course in courses
            for name, points in sorted(course.items())
            if name.endswith(ends)
        ]
        made.append(drawn(series, "training steps", up, title, text, log=True))
    return [each for each in made if each is not None]


def labelled(name: str, ends: Sequence[str]) -> str:
    """A number in words, without what the title says."""
    said = name.replace(ends[0], "") if all(end.startswith(ends[0]) for end in ends) else name
    return (said or name).replace("_", " ")


def is_course(name: str) -> bool:
    """Whether a number of the metrics is drawn: of levels and memories, not of the update."""
    return name != "grad_norm" and any(name.endswith(ends) for ends, *_ in IN_TRAINING)


def groups(classes: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Group]:
    """Sets of classes, a group a run."""
    found: list[Group] = []
    for title, each in classes:
        header, *rows = classes_shown.lines(each)
        found.append(Group(f"{title}, {each['set']}", header, rows, classes_shown.pictures(each)))
    return found


def table(line: Measured) -> list[tuple[str, str, str, str, str, str, str]]:
    """The rows of a stream: way, cell, score, interval, items, updates, bytes."""
    rows: list[tuple[str, str, str, str, str, str, str]] = []
    for way in line.ways:
        updates = ", ".join(f"{n:.4g}" for n in stream_table.fired(line, way)) or "–"
        for each in figures(line, way):
            low, high = stream_table.bounds(line, each.estimate)
            rows.append((way, each.cell, stream_table.said(line, each.estimate), f"{low} to {high}",
                         f"{column(line.rows, way, each.cell).shape[1]:,}", updates,
                         f"{stream_table.held(line, way):,}"))  # fmt: skip
    return rows


def limits(lines: Sequence[Measured]) -> list[str]:
    """What the figures leave open."""
    few = min((len(line.seeds) for line in lines), default=FEW)
    found = [f"Seeds: {few} of some runs; another seed may fall outside these intervals."] if few < FEW else []
    return [*found, *SAID]


def page(
    lines: Sequence[Measured],
    sentences: Sequence[str],
    classes: Sequence[tuple[str, Mapping[str, Any]]],
    courses: Sequence[tuple[str, Course]],
    facts: Sequence[tuple[str, str]],
) -> str:
    """The whole file: `sentences` say what the figures say, `classes` are titles and what `recipe.incremental` gave."""
    pictures = [*filter(None, (by_position(lines), by_gap(lines))), *in_training(courses)] if drawable() else []
    return template("learning.html").render(
        lines=[(line, table(line)) for line in lines], sentences=sentences, groups=groups(classes), pictures=pictures,
        drawable=drawable(), legend=stream_table.LEGEND, classes_legend=classes_shown.LEGEND, facts=facts,
        reported=[(x, [*zip(x.rows, reported_learning.words(x, lines), strict=True)])
                  for x in reported_learning.tables()],
        colours=drawings.COLOURS, limits=limits(lines), shades=len(drawings.COLOURS),
    )  # fmt: skip
