"""Runs side by side: the table on a terminal, what may be said of it, and one HTML page that asks for nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from laconic.core.generate import Passes
from laconic.evaluation import drawings, statistics
from laconic.evaluation.looked import Looked
from laconic.evaluation.pages import template
from laconic.evaluation.similarity import SPACES
from laconic.evaluation.statistics import Difference, Estimate, Scores
from laconic.evaluation.timing import Latency

FEW = 3  # seeds below which no headline is made


@dataclass(frozen=True)
class Line:
    """One way to answer, over its seeds: `right` [R, N], `curves` a (step, share right) list for each seed.

    `passes` and `held` are means of a question; `sweep` the shares right by number of test-time rounds, per seed;
    `teacher` what the same weights reach by writing the chain, per seed. `trained` is the rounds it was trained with,
    `tint` its colour's place in `drawings.COLOURS`.
    """

    name: str
    title: str
    about: str
    right: Scores
    passes: tuple[float, float, float, float]
    held: tuple[float, float]
    control: bool = False
    tint: int = 0
    latency: Latency | None = None
    per_second: float | None = None
    bytes_each: int = 0
    curves: Sequence[Sequence[tuple[int, float]]] = ()
    sweep: Mapping[int, Sequence[float]] = field(default_factory=dict[int, Sequence[float]])
    trained: int | None = None
    teacher: Sequence[float] = ()
    seconds: Sequence[float] = ()

    @property
    def found(self) -> Estimate:
        """Accuracy with its interval."""
        return statistics.share(self.right)


@dataclass(frozen=True)
class Report:
    """All that the page shows. `focus` names the line that others are compared with, `chain` the one that writes it."""

    title: str
    lead: str
    lines: Sequence[Line]
    focus: str
    chain: str
    floor: tuple[str, float]
    protocol: str
    seeds: Sequence[int]
    limits: Sequence[str] = ()
    differs: Sequence[tuple[str, str, str]] = ()
    facts: Sequence[tuple[str, str]] = ()
    runs: Sequence[tuple[str, str]] = ()
    command: str = ""
    inspection: Looked | None = None
    chosen: str = "Question"

    def line(self, name: str) -> Line | None:
        """The line of that name."""
        return next((line for line in self.lines if line.name == name), None)

    @property
    def questions(self) -> int:
        """How many problems every line answered."""
        return self.lines[0].right.shape[1]


class Compared(NamedTuple):
    """The focus against another line, and what may be said of it."""

    other: Line
    difference: Difference
    claim: bool
    sentence: str


def comparisons(report: Report) -> list[Compared]:
    """The focus minus every other line, with Holm's correction over all of them."""
    focus = report.line(report.focus)
    others = [line for line in report.lines if line.name != report.focus]
    if focus is None:
        return []
    found = [statistics.difference(*common(focus, line)) for line in others]
    claims = statistics.shown(found)
    rows = zip(others, found, claims, strict=True)
    return [Compared(line, d, claim, statistics.sentence(d, claim)) for line, d, claim in rows]


def common(a: Line, b: Line) -> tuple[Scores, Scores]:
    """The seeds that both lines have, from the first."""
    n = min(len(a.right), len(b.right))
    return a.right[:n], b.right[:n]


def percent(share: float) -> str:
    """A share in a hundred, one decimal."""
    return f"{100 * share:.1f}"


def accuracy(found: Estimate) -> str:
    """A headline needs three seeds for its ±; fewer are named."""
    if found.sd is not None and found.seeds >= FEW:
        return f"{percent(found.mean)} ± {percent(found.sd)} %"
    return f"{percent(found.mean)} %"


def interval(found: Estimate) -> str:
    """The 95 % interval in a hundred."""
    return f"{percent(found.low)} – {percent(found.high)}"


def number(x: float) -> str:
    """A mean count: whole if it is whole."""
    return f"{x:.0f}" if abs(x - round(x)) < 0.005 else f"{x:.1f}"


def parts(passes: Sequence[float]) -> str:
    """Passes by part, those that occur: `1 place + 3 think + 2 answer`."""
    return " + ".join(f"{number(n)} {name}" for name, n in zip(Passes._fields, passes, strict=True) if n)


def cells(line: Line) -> tuple[str, str, str, str, str, str]:
    """A row of the table: accuracy, interval, passes, their parts, positions held, milliseconds."""
    took = "–" if line.latency is None else f"{line.latency.median:.1f}"
    held = f"{number(line.held[0])} → {number(line.held[1])}"
    found = line.found
    return accuracy(found), interval(found), number(sum(line.passes)), parts(line.passes), held, took


def table(report: Report) -> Any:
    """The rows for a terminal."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="")
    for i, name in enumerate(("", "accuracy", "95 % interval", "passes", "positions", "ms")):
        made.add_column(name, justify="right" if i else "left", no_wrap=True)
    for i, line in enumerate(report.lines):
        if line.control and i and not report.lines[i - 1].control:
            made.add_row()
        right, bounds, total, _, held, took = cells(line)
        made.add_row(line.title, right, bounds, f"{total} = {'+'.join(map(number, line.passes))}", held, took)
    return made


def words(report: Report) -> str:
    """What stands under the table on a terminal."""
    answer, floor = report.floor
    n = f"n={len(report.seeds)}"
    head = f'majority floor {percent(floor)} % (always "{answer}"); {report.questions:,} unseen problems, {n}'
    against = [f"{c.other.title}: {c.sentence}" for c in comparisons(report)]
    focus = report.line(report.focus)
    title = [f"{focus.title} against"] if focus and against else []
    shown = [f"  {text}" for text in against]
    units = "passes: read + place + think + answer; positions held when the answer begins and ends; ms: one at a time"
    return "\n".join([head, units, "", *title, *shown, "", "Not shown", *(f"  {text}" for text in limits(report))])


def plain(report: Report) -> dict[str, Any]:
    """The figures as JSON holds them."""
    rows = [
        {
            "name": line.name,
            "control": line.control,
            "accuracy": line.found._asdict(),
            "passes": dict(zip(Passes._fields, line.passes, strict=True)) | {"total": sum(line.passes)},
            "held": {"begin": line.held[0], "end": line.held[1], "bytes": line.held[1] * line.bytes_each},
            "milliseconds": line.latency and line.latency._asdict(),
            "teacher": list(line.teacher),
            "sweep": {str(rounds): list(shares) for rounds, shares in line.sweep.items()},
            "seconds": list(line.seconds),
        }
        for line in report.lines
    ]
    against = [
        {"other": c.other.name, **c.difference._asdict(), "claim": c.claim, "text": c.sentence}
        for c in comparisons(report)
    ]
    floor = {"answer": report.floor[0], "share": report.floor[1]}
    about = {"protocol": report.protocol, "seeds": list(report.seeds), "questions": report.questions, "floor": floor}
    return {"schema": 1, **about, "rows": rows, "against": against, "limits": limits(report)}


def limits(report: Report) -> list[str]:
    """What the figures themselves say is not shown, then what the report was told."""
    focus, chain = report.line(report.focus), report.line(report.chain)
    found: list[str] = []
    if len(report.seeds) < FEW:
        runs = "one run" if len(report.seeds) == 1 else f"{len(report.seeds)} runs"
        found.append(f"Seeds: {runs} of each. The intervals are of these runs; another seed may fall outside them.")
    if focus and chain:
        few, many = sum(focus.passes), sum(chain.passes)
        if few >= many:
            found.append(
                f"Passes are not saved: {focus.title} takes {number(few)} a question, the chain {number(many)}."
            )
        if focus.held[1] >= chain.held[1]:
            found.append(
                f"The cache is not shorter: {number(focus.held[1])} positions at the end, {number(chain.held[1])} "
                "with the chain."
            )
    for c in comparisons(report):
        if not c.claim and c.other.control:
            found.append(f"That {focus.title if focus else ''} does more than {c.other.title}: {c.sentence}.")
    return [*found, *report.limits]


def page(report: Report) -> str:
    """The whole file."""
    lines = [line for line in report.lines if not line.control]
    return template("report.html", percent=percent, number=number).render(
        r=report, rows=[(line, cells(line), line.found) for line in report.lines], compared=comparisons(report),
        few=len(report.seeds) < FEW, limits=limits(report), pictures=drawings.pictures(lines, report.floor[1]),
        thoughts=report.inspection and thoughts(report.inspection), colours=drawings.COLOURS,
    )  # fmt: skip


def thoughts(found: Looked) -> dict[str, Any]:
    """The inspected question as the page's grids take it."""
    held = found.kept.held if found.kept else np.zeros((0, 0, 0))
    maps = ((what, found.map(what, "chain")) for what in SPACES)
    return {
        "shown": found.words,
        "hits": sum(word in found.words.chain for word in found.words.top),
        "slots": len(found.words.top),
        "heads": [
            (l, g, set(np.flatnonzero(head).tolist()))
            for l, layer in zip(found.matched, held, strict=True)
            for g, head in enumerate(layer)
        ],
        "whole": bool(held.all()),
        "shares": found.kept.shares if found.kept else (),
        "stands": list(found.stands),
        "maps": [(f"{what[0].upper()}{what[1:]}, student and teacher", map.mean) for what, map in maps if map],
    }
