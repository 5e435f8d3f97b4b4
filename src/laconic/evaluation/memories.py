"""The page on runs that read: what a memory is worth, against how many vectors, and what learned lengths bring."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment
from markupsafe import Markup

from laconic.evaluation import drawings, pareto, recalled
from laconic.evaluation.contexts import ERRORS, TEXTS, UNTRAINED, Worth, curve, ways_of
from laconic.evaluation.drawings import INK, LINE, svg, tint
from laconic.evaluation.pareto import END, FIXED, LEARNED, ORACLE, Point, Verdict
from laconic.evaluation.reading import Line
from laconic.evaluation.report import FEW, number, percent
from laconic.evaluation.scored import WIDTH

HERE = Path(__file__).parent
PAGE = (HERE / "memories.html").read_text(encoding="utf-8")
REPORTED = tomllib.loads((HERE / "reported_reading.toml").read_text(encoding="utf-8"))["table"]
KINDS = (FIXED, LEARNED, END, ORACLE)
WORDS = {"none": "no context", "full": "whole text", f"{UNTRAINED} none": f"no context, {UNTRAINED}"}
MARKS = {FIXED: ("o", "-"), LEARNED: ("D", "none"), END: (".", ":"), ORACLE: (".", "--")}
SAID = (
    "That a learned length is better than a fixed one of the same mean is not known: no run of the original design was "
    "published, the nearest published attempts report that continuous ratios fail (arXiv:2603.25926) and that means "
    "over spans do better (arXiv:2510.20797). A verdict here is of these runs alone.",
    "A compressed context loses to the plain text wherever that fits the model.",
    "A memory that is replaced forgets; what tiny models show does not carry over to large ones.",
    "The soft figures are of another reading, not of the one that is used: a gate bounds no information.",
)


class Key(NamedTuple):
    """A series of a picture, for its legend."""

    title: str
    tint: int
    kind: str


class Block(NamedTuple):
    """All that the page shows of a set."""

    name: str
    documents: int
    facts: bool
    rows: Sequence[tuple[Line, Worth, bool]]
    picture: Markup | None
    keys: Sequence[Key]
    along: Markup | None
    verdicts: Sequence[Verdict]
    lines: Sequence[Line]


def short(way: str) -> bool:
    """Whether a way stands in the table itself; lengths one by one stand folded beneath it."""
    return not way.startswith(("n = ", "end", "quantile"))


def block(i: int, lines: Sequence[Line]) -> Block:
    """The runs on the same documents; `i` tells drawings apart."""
    rows = [(line, worth, short(worth.way)) for line in lines for worth in line.worths]
    found = [point for line in lines for point in pareto.points(line)]
    runs = list(dict.fromkeys(line.run for line in lines))
    drawn = picture(found, runs, lines[0].facts, i) if drawable() and found else None
    keys = [
        Key(f"{run}: {kind}", runs.index(run), kind)
        for run in runs
        for kind in KINDS
        if any(p.run == run and p.kind == kind for p in found)
    ]
    long = sum(bool(n) for n in lines[0].rows[0][0].scored) > 1
    along = positions(lines, i) if drawable() and long else None
    return Block(
        lines[0].set, len(lines[0].rows[0]), lines[0].facts, rows, drawn, keys, along, pareto.verdicts(lines), lines
    )


def drawable() -> bool:
    """Whether matplotlib is there (extra `report`)."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def canvas(across: str, up: str) -> tuple[Any, Any]:
    """An empty plot in the page's colours."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 3.4))
    axes = figure.add_axes((0.11, 0.13, 0.87, 0.84))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.set_axisbelow(True)
    axes.set_xlabel(across, color=INK, fontsize=9)
    axes.set_ylabel(up, color=INK, fontsize=9)
    return figure, axes


def picture(found: Sequence[Point], runs: Sequence[str], facts: bool, i: int) -> Markup:
    """Quality against vectors; up is better."""
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


def sentences(blocks: Sequence[Block]) -> list[str]:
    """What the figures say, first of all."""
    found: list[str] = []
    for each in blocks:
        for line in each.lines:
            said = {w.way: w for w in line.worths}
            if "compressed" in said:
                found.append(headline(line, said))
    return found


def headline(line: Line, said: dict[str, Worth]) -> str:
    """A run on a set in a sentence."""
    w = said["compressed"]
    times = w.gain.mean / w.se if w.se > 0 else float("nan")
    text = (
        f"{line.set}, {line.run}: {w.vectors:.2f} vectors a segment save {w.gain.mean:+.4f} ± {w.se:.4f} nats a token"
    )
    text += f" ({times:.1f} standard errors)"
    text += f", {percent(w.share)} % of what the whole text saves" if w.share is not None else ""
    if "truncated" in said:
        text += f"; as many tokens of text save {said['truncated'].gain.mean:+.4f}"
    return text + "."


def judged(found: Verdict) -> str:
    """A verdict in words."""
    if found.helps:
        return "above the line"
    return "below the line" if found.apart < -ERRORS * found.se else "no difference shown"


def words(way: str) -> str:
    """What a way is called on the page."""
    return WORDS.get(way, way)


def signed(x: float, digits: int) -> str:
    """A difference with its sign, without a negative 0."""
    return f"{round(x, digits) + 0.0:+.{digits}f}"


def limits(blocks: Sequence[Block]) -> list[str]:
    """What the figures themselves say is not shown, then what is always to be said."""
    lines = [line for each in blocks for line in each.lines]
    found: list[str] = []
    few = min(len(line.seeds) for line in lines)
    if few < FEW:
        found.append(f"Seeds: {few} of some runs. Intervals are of these runs; another seed may fall outside them.")
    texts = [len({row.id.split("@")[0] for row in line.rows[0]}) for line in lines if not line.facts]
    if texts and min(texts) < TEXTS:
        found.append(
            f"Documents are stretches of {min(texts)} texts; standard errors are over stretches, which are alike "
            "within one text, so those over texts are larger."
        )
    return [*found, *SAID]


def recalls(blocks: Sequence[Block]) -> list[tuple[Line, str, list[recalled.ByFacts], float | None]]:
    """Recall by the number of facts, of the lengths that each run has by itself."""
    return [
        (line, way, recalled.by_facts(line.together, way), recalled.correlation(line.together, way))
        for each in blocks
        if each.facts
        for line in each.lines
        for way in ("compressed", "sampled")
        if way in ways_of(line.rows)
    ]


def histograms(blocks: Sequence[Block]) -> list[tuple[Line, list[tuple[int, float]]]]:
    """Shares of segments by their length, of runs that learn it."""
    found: list[tuple[Line, list[tuple[int, float]]]] = []
    for each in blocks:
        for line in each.lines:
            if line.about.get("length") in ("stop", "ratio"):
                counts = recalled.histogram(line.together, "compressed")
                total, lengths = sum(counts.values()), range(min(1, *counts), int(line.about["cap"]) + 1)
                found.append((line, [(n, counts.get(n, 0) / total) for n in lengths]))
    return found


def page(lines: Sequence[Line], facts: Sequence[tuple[str, str]] = ()) -> str:
    """The whole file."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "number": number, "judged": judged, "words": words, "signed": signed}
    sets: dict[Any, list[Line]] = {}
    for line in lines:
        sets.setdefault((line.set, pareto.documents(line)), []).append(line)
    blocks = [block(i, same) for i, same in enumerate(sets.values())]
    gaps = [(line, gap) for line in lines if (gap := recalled.gap(line.together)) is not None]
    return environment.from_string(PAGE).render(
        blocks=blocks, sentences=sentences(blocks), recalls=recalls(blocks), gaps=gaps, histograms=histograms(blocks),
        limits=limits(blocks), reported=REPORTED, facts=facts, colours=drawings.COLOURS, exp=np.exp,
        untrained=UNTRAINED, errors=ERRORS,
    )  # fmt: skip
