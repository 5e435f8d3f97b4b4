"""Runs on sets of questions: the table, the mean over sets, what one run has more than another, and its JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from laconic.core.errors import BadInput
from laconic.core.generate import Passes
from laconic.evaluation import protocols, statistics
from laconic.evaluation.evaluate import Result
from laconic.evaluation.report import FEW, accuracy, interval, number, percent
from laconic.evaluation.reported import Reported, words
from laconic.evaluation.statistics import Difference, Estimate, Scores
from laconic.evaluation.timing import Latency, Throughput, caveats

MEAN = "mean of sets"
CHAIN = "chain"  # the way of the same weights with the chain written out
UNCHANGED = "unchanged_from_gsm8k"  # the mark of GSM-Hard's questions that are plain GSM8K


@dataclass(frozen=True)
class Line:
    """One way to answer one set, over the seeds of a run.

    `way` is empty as trained, `chain`, or a number of rounds. A `part` of a set counts in no mean. `paper` is what
    papers report, None for a recipe that stands for none.
    """

    set: str
    run: str
    way: str
    seeds: tuple[int, ...]
    results: tuple[Result, ...]
    part: bool = False
    paper: Sequence[Reported] | None = None
    latency: Latency | None = None
    throughput: Throughput | None = None

    @cached_property
    def right(self) -> Scores:
        """[seeds, questions]."""
        return np.stack([result.right for result in self.results])

    @cached_property
    def found(self) -> Estimate:
        """Accuracy with its interval."""
        return statistics.share(self.right)

    @property
    def title(self) -> str:
        """The run and how it answers."""
        return f"{self.run}, {self.way}" if self.way else self.run

    @property
    def passes(self) -> tuple[float, ...]:
        """Decoder calls of a question by part."""
        return tuple(np.mean([result.passes for result in self.results], axis=0).tolist())

    @property
    def held(self) -> tuple[float, float]:
        """Cache positions when the answer begins, and at its end."""
        begin, end = np.mean([result.held for result in self.results], axis=0).tolist()
        return begin, end

    @property
    def bytes(self) -> float:
        """Of the cache at the answer's end."""
        return self.held[1] * self.results[0].bytes_each


class Compared(NamedTuple):
    """Run A less run B on a set: what may be said of it; `mcnemar` is the p of two single runs."""

    set: str
    a: str
    b: str
    difference: Difference
    claim: bool
    sentence: str
    mcnemar: float | None


@dataclass(frozen=True)
class Table:
    """All that was asked; `against` names the run that others are compared with.

    Raises `BadInput` (66) where lines of a set are not of the same questions.
    """

    lines: Sequence[Line]
    against: str | None = None
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = field(default_factory=tuple[str, ...])

    @cached_property
    def protocol(self) -> str:
        """The one protocol of every figure. Raises `Usage` (2) for two."""
        return protocols.same([result.protocol for line in self.lines for result in line.results])

    @property
    def sets(self) -> list[str]:
        """In the order asked for."""
        return list(dict.fromkeys(line.set for line in self.lines))

    def of(self, name: str) -> list[Line]:
        """The lines of a set."""
        return [line for line in self.lines if line.set == name]

    def __post_init__(self) -> None:
        for name in self.sets:
            lines = self.of(name)
            asked = {tuple((row.question, row.gold) for row in each.rows) for line in lines for each in line.results}
            if len(asked) > 1:
                runs = " and ".join(dict.fromkeys(line.run for line in lines))
                raise BadInput(f"{name}: {runs} were asked other questions; name a set that is the same for all")


def apart(line: Line, changed: Sequence[bool]) -> Line | None:
    """The line of GSM-Hard's changed questions alone; None where all are, or none."""
    if all(changed) or not any(changed):
        return None
    kept = [replace(r, rows=tuple(row for row, yes in zip(r.rows, changed, strict=True) if yes)) for r in line.results]
    return replace(line, set=f"{line.set}, changed", results=tuple(kept), part=True, paper=None)


def means(table: Table) -> list[tuple[str, Estimate]]:
    """The plain mean over sets of every run and way that answered two or more."""
    titles = dict.fromkeys(line.title for line in table.lines)
    held = {title: [line.right for line in table.lines if line.title == title and not line.part] for title in titles}
    return [(title, statistics.macro(rights)) for title, rights in held.items() if len(rights) > 1]


def comparisons(table: Table) -> list[Compared]:
    """Every run as trained less the one it is compared with, on each set and in the mean, with Holm's correction."""
    runs = dict.fromkeys(line.run for line in table.lines if line.run != table.against)
    found: list[tuple[str, str, Difference, float | None]] = []
    for run in runs if table.against else ():
        pairs = [(name, *pair) for name in table.sets if (pair := paired(table, name, run))]
        found += [(name, run, statistics.difference(a, b), single(a, b)) for name, a, b, _ in pairs]
        whole = [(a, b) for _, a, b, part in pairs if not part]
        if len(whole) > 1:
            found.append((MEAN, run, statistics.macro_difference(*zip(*whole, strict=True)), None))
    claims = statistics.shown([difference for _, _, difference, _ in found])
    return [
        Compared(name, run, str(table.against), d, claim, statistics.sentence(d, claim), p)
        for (name, run, d, p), claim in zip(found, claims, strict=True)
    ]


def paired(table: Table, name: str, run: str) -> tuple[Scores, Scores, bool] | None:
    """What two runs have right on a set: those of equal seeds, else in their order; and whether it is a part."""
    lines = {line.run: line for line in table.of(name) if not line.way}
    if run not in lines or table.against not in lines:
        return None
    a, b = lines[run], lines[table.against]
    both = [seed for seed in a.seeds if seed in b.seeds]
    if both:
        return a.right[[a.seeds.index(s) for s in both]], b.right[[b.seeds.index(s) for s in both]], a.part
    n = min(len(a.seeds), len(b.seeds))
    return a.right[:n], b.right[:n], a.part


def single(a: Scores, b: Scores) -> float | None:
    """McNemar's p where both are one run."""
    return statistics.mcnemar(a[0], b[0]) if len(a) == 1 else None


def headline(found: Estimate) -> str:
    """The accuracy; a ± needs three seeds, fewer are named."""
    return accuracy(found) if found.seeds >= FEW else f"{accuracy(found)} (n={found.seeds})"


COLUMNS = ("", "accuracy", "95 % interval", "first pass", "think", "answer", "passes", "positions", "KiB", "papers")
TIMED = ("ms", "ms 90 %", "a second")


def shown(table: Table) -> Any:
    """The table for a terminal: a block for each set, its floor on top."""
    from rich.table import Table as Made

    timed = any(line.latency for line in table.lines)
    made = Made(box=None, pad_edge=False, header_style="")
    for i, name in enumerate((*COLUMNS, *(TIMED if timed else ()))):
        made.add_column(name, justify="right" if i else "left", no_wrap=True)
    for name in table.sets:
        lines = table.of(name)
        answer, share = lines[0].results[0].floor
        n = lines[0].found.questions
        made.add_row(f"{name}: {n:,} questions")
        made.add_row(f"  always “{answer}”", f"{percent(share)} %")
        for line in lines:
            made.add_row(f"  {line.title}", *cells(line, timed))
    for i, (title, found) in enumerate(means(table)):
        if not i:
            made.add_row(MEAN)
        made.add_row(f"  {title}", headline(found), interval(found))
    return made


def cells(line: Line, timed: bool) -> list[str]:
    """A row of the table."""
    read, place, think, answer = line.passes
    begin, end = line.held
    found = [
        headline(line.found), interval(line.found), *map(number, (read + place, think, answer, sum(line.passes))),
        f"{number(begin)} → {number(end)}", f"{line.bytes / 1024:,.1f}", words(line.paper),
    ]  # fmt: skip
    if not timed:
        return found
    took, many = line.latency, line.throughput
    ms = ["–", "–"] if took is None else [f"{took.median:.1f}", f"{took.p90:.1f}"]
    return [*found, *ms, "–" if many is None else f"{many.per_second:.1f}"]


def footnotes(table: Table) -> str:
    """What stands under the table."""
    head = [f"protocol {table.protocol}; passes and positions are means of a question; KiB of the cache at its end"]
    compared = comparisons(table)
    against = [
        f"  {c.set}: {c.a} against {c.b}: {c.sentence}"
        + (f"; McNemar p {c.mcnemar:.3g}" if c.mcnemar is not None else "")
        for c in compared
    ]
    return "\n".join([*head, *(["", "differences, Holm's correction over all"] if against else []), *against, "",
                      *limits(table), *table.notes, *(f"{name}: {text}" for name, text in table.facts)])  # fmt: skip


def limits(table: Table) -> list[str]:
    """What these figures do not show."""
    found: list[str] = []
    few = sorted({line.found.seeds for line in table.lines if line.found.seeds < FEW})
    if few:
        found.append(f"n={few[0]}: the intervals are of these runs; another seed may fall outside them")
    for line in table.lines:
        chain = next((c for c in table.of(line.set) if (c.run, c.way) == (line.run, CHAIN)), None)
        if line.way or line.part or chain is None:
            continue
        saved = sum(line.passes) < sum(chain.passes)
        if line.held[1] >= chain.held[1]:
            text = f"{number(line.held[1])} positions, {number(chain.held[1])} with the chain"
            alone = "; only passes are saved" if saved else ""
            found.append(f"{line.set}: the cache of {line.run} is not shorter: {text}{alone}")
        if not saved:
            text = f"{number(sum(line.passes))} a question, {number(sum(chain.passes))} with the chain"
            found.append(f"{line.set}: no passes are saved by {line.run}: {text}")
    for line in table.lines:
        if line.latency and line.throughput:
            found += [f"{line.set}: {text}" for text in caveats(line.found.questions, line.latency, line.throughput)]
    return list(dict.fromkeys(found))


def plain(table: Table) -> dict[str, Any]:
    """The figures as JSON holds them."""
    sets = [
        {
            "set": name,
            "questions": (lines := table.of(name))[0].found.questions,
            "floor": dict(zip(("answer", "share"), lines[0].results[0].floor, strict=True)),
            "part": lines[0].part,
            "runs": [row(line) for line in lines],
        }
        for name in table.sets
    ]
    compared = [
        {"set": c.set, "run": c.a, "against": c.b, **c.difference._asdict()}
        | {"claim": c.claim, "text": c.sentence, "mcnemar": c.mcnemar}
        for c in comparisons(table)
    ]
    return {
        "schema": 1,
        "protocol": table.protocol,
        "sets": sets,
        "means": [{"run": title, "accuracy": found._asdict()} for title, found in means(table)],
        "differences": compared,
        "limits": limits(table),
        "notes": list(table.notes),
        "facts": dict(table.facts),
    }


def row(line: Line) -> dict[str, Any]:
    """One line as JSON holds it."""
    read, place, *_ = line.passes
    return {
        "run": line.run,
        "way": line.way or "as trained",
        "seeds": list(line.seeds),
        "accuracy": line.found._asdict(),
        "unanswered": sum(answer.prediction is None for result in line.results for answer in result.rows),
        "passes": dict(zip(Passes._fields, line.passes, strict=True))
        | {"first": read + place, "total": sum(line.passes)},
        "held": {"begin": line.held[0], "end": line.held[1], "bytes": line.bytes},
        "papers": None if line.paper is None else [each._asdict() for each in line.paper] or "not known",
        "milliseconds": line.latency and line.latency._asdict(),
        "per_second": line.throughput and line.throughput.per_second,
        "at_once": line.throughput and line.throughput.batch,
    }
