"""The page on runs that read: what a memory is worth, against how many vectors, and what learned lengths bring."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from laconic.evaluation import drawings, pareto, recalled, reported_reading
from laconic.evaluation.contexts import ERRORS, TEXTS, TUNED, UNTRAINED, Worth, ways_of
from laconic.evaluation.drawings import drawable
from laconic.evaluation.pages import template
from laconic.evaluation.pareto import Verdict
from laconic.evaluation.pictures import Key, legend, picture, positions, words
from laconic.evaluation.reading import Line
from laconic.evaluation.report import FEW, number, percent
from laconic.evaluation.told import Told

SAID = (
    "That a learned length is better than a fixed one of the same mean is not known: no run of the original design was "
    "published, the nearest published attempts report that continuous ratios fail (arXiv:2603.25926) and that means "
    "over spans do better (arXiv:2510.20797). A verdict here is of these runs alone.",
    "A compressed context loses to the plain text wherever that fits the model.",
    "A memory that is replaced forgets; what tiny models show does not carry over to large ones.",
    "The soft figures are of another reading, not of the one that is used: a gate bounds no information.",
)


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

    @property
    def tuned(self) -> bool:
        """Whether a plain run stands beside."""
        return any(TUNED in ways_of(line.rows) for line in self.lines)


def short(way: str) -> bool:
    """Whether a way stands in the table itself; lengths one by one stand folded beneath it."""
    return not way.startswith(("n = ", "end", "quantile"))


def block(i: int, lines: Sequence[Line]) -> Block:
    """The runs on the same documents; `i` tells drawings apart."""
    rows = [(line, worth, short(worth.way)) for line in lines for worth in line.worths]
    found = [point for line in lines for point in pareto.points(line)]
    runs = list(dict.fromkeys(line.run for line in lines))
    drawn = picture(found, runs, lines, i) if drawable() and len(found) > 1 else None
    keys = legend(found, runs, lines)
    long = sum(bool(n) for n in lines[0].rows[0][0].scored) > 1
    along = positions(lines, i) if drawable() and long else None
    return Block(
        lines[0].set, len(lines[0].rows[0]), lines[0].facts, rows, drawn, keys, along, pareto.verdicts(lines), lines
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
    if TUNED in said:
        text += f"; a plain model trained as long saves {said[TUNED].gain.mean:+.4f} with the whole text"
    return text + "."


def judged(found: Verdict) -> str:
    """A verdict in words."""
    if found.helps:
        return "above the line"
    return "below the line" if found.apart < -ERRORS * found.se else "no difference shown"


def signed(x: float, digits: int) -> str:
    """A difference with its sign, without a negative 0."""
    return f"{round(x, digits) + 0.0:+.{digits}f}"


def limits(blocks: Sequence[Block], told: Sequence[Told] = ()) -> list[str]:
    """What the figures themselves say is not shown, then what is always to be said."""
    lines = [line for each in blocks for line in each.lines]
    found: list[str] = []
    few = min([len(each.seeds) for each in (*lines, *told)], default=FEW)
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


def page(lines: Sequence[Line], told: Sequence[Told] = (), facts: Sequence[tuple[str, str]] = ()) -> str:
    """The whole file; `told` are findings on files."""
    filters = {"percent": percent, "number": number, "judged": judged, "words": words, "signed": signed}
    sets: dict[Any, list[Line]] = {}
    for line in lines:
        sets.setdefault((line.set, line.documents), []).append(line)
    blocks = [block(i, same) for i, same in enumerate(sets.values())]
    gaps = [(line, gap) for line in lines if (gap := recalled.gap(line.together)) is not None]
    return template("memories.html", **filters).render(
        blocks=blocks, sentences=sentences(blocks), recalls=recalls(blocks), gaps=gaps, histograms=histograms(blocks),
        answers=files(told, "answers"), labels=files(told, "labels"), limits=limits(blocks, told),
        papers=reported_reading.judged_rows(lines, told),
        facts=facts, colours=drawings.COLOURS, exp=np.exp, untrained=UNTRAINED, tuned=TUNED, errors=ERRORS,
        drawn=drawable(),
    )  # fmt: skip


def files(told: Sequence[Told], kind: str) -> list[list[Told]]:
    """The findings of a kind, those on one file together."""
    found: dict[tuple[str, bool], list[Told]] = {}
    for each in told:
        if each.kind == kind:
            found.setdefault((each.file, each.aware), []).append(each)
    return [*found.values()]
