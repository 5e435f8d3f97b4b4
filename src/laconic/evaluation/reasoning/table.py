"""Runs on sets of questions: the table, the mean over sets, what one run has more than another, and its JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from laconic.batches import PassCounts
from laconic.data.reasoning import answer_matching
from laconic.errors import InputError
from laconic.evaluation import statistics
from laconic.evaluation.reasoning.evaluate import ReasoningResult
from laconic.evaluation.reasoning.latency import Latency, Throughput, timing_caveats
from laconic.evaluation.report.paper_figures import PaperFigure, format_paper_figures
from laconic.evaluation.report.runs_table import (
    MIN_SEEDS,
    format_accuracy,
    format_count,
    format_interval,
    format_percent,
)
from laconic.evaluation.statistics import Difference, Estimate, ScoreMatrix

MEAN_TITLE = "mean of sets"
COT_CONDITION = "chain"  # the way of the same weights with the chain written out
UNCHANGED_FLAG = "unchanged_from_gsm8k"  # the mark of GSM-Hard's questions that are plain GSM8K


@dataclass(frozen=True)
class ReasoningRow:
    """One way to answer one set, over the seeds of a run.

    `way` is empty as trained, `chain`, or a number of rounds. A `part` of a set counts in no mean. `paper` is what
    papers report, None for a recipe that stands for none.
    """

    dataset: str
    run: str
    condition: str
    seeds: tuple[int, ...]
    results: tuple[ReasoningResult, ...]
    is_subset: bool = False
    paper_figures: Sequence[PaperFigure] | None = None
    latency: Latency | None = None
    throughput: Throughput | None = None

    @cached_property
    def correct(self) -> ScoreMatrix:
        """[seeds, questions]."""
        return np.stack([result.correct for result in self.results])

    @cached_property
    def accuracy(self) -> Estimate:
        """Accuracy with its interval."""
        return statistics.estimate_proportion(self.correct)

    @property
    def title(self) -> str:
        """The run and how it answers."""
        return f"{self.run}, {self.condition}" if self.condition else self.run

    @property
    def mean_passes(self) -> tuple[float, ...]:
        """Decoder calls of a question by part."""
        return tuple(np.mean([result.mean_passes for result in self.results], axis=0).tolist())

    @property
    def mean_cache_positions(self) -> tuple[float, float]:
        """Cache positions when the answer begins, and at its end."""
        begin, end = np.mean([result.mean_cache_positions for result in self.results], axis=0).tolist()
        return begin, end

    @property
    def cache_bytes(self) -> float:
        """Of the cache at the answer's end."""
        return self.mean_cache_positions[1] * self.results[0].bytes_per_position


class RunComparison(NamedTuple):
    """Run A less run B on a set: what may be said of it; `mcnemar` is the p of two single runs."""

    dataset: str
    run: str
    baseline: str
    difference: Difference
    is_significant: bool
    text: str
    mcnemar_p: float | None


@dataclass(frozen=True)
class ReasoningTable:
    """All that was asked; `against` names the run that others are compared with.

    Raises `BadInput` (66) where lines of a set are not of the same questions.
    """

    rows: Sequence[ReasoningRow]
    baseline: str | None = None
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = field(default_factory=tuple[str, ...])

    @cached_property
    def protocol(self) -> str:
        """The one protocol of every figure. Raises `Usage` (2) for two."""
        return answer_matching.require_one_protocol([result.protocol for line in self.rows for result in line.results])

    @property
    def datasets(self) -> list[str]:
        """In the order asked for."""
        return list(dict.fromkeys(line.dataset for line in self.rows))

    def rows_of(self, name: str) -> list[ReasoningRow]:
        """The lines of a set."""
        return [line for line in self.rows if line.dataset == name]

    def __post_init__(self) -> None:
        for name in self.datasets:
            lines = self.rows_of(name)
            asked = {
                tuple((row.question_hash, row.gold) for row in each.records) for line in lines for each in line.results
            }
            if len(asked) > 1:
                runs = " and ".join(dict.fromkeys(line.run for line in lines))
                raise InputError(f"{name}: {runs} were asked other questions; name a set that is the same for all")


def changed_subset(line: ReasoningRow, changed: Sequence[bool]) -> ReasoningRow | None:
    """The line of GSM-Hard's changed questions alone; None where all are, or none."""
    if all(changed) or not any(changed):
        return None
    kept = [
        replace(r, records=tuple(row for row, yes in zip(r.records, changed, strict=True) if yes)) for r in line.results
    ]
    return replace(line, dataset=f"{line.dataset}, changed", results=tuple(kept), is_subset=True, paper_figures=None)


def macro_averages(table: ReasoningTable) -> list[tuple[str, Estimate]]:
    """The plain mean over sets of every run and way that answered two or more."""
    titles = dict.fromkeys(line.title for line in table.rows)
    held = {
        title: [line.correct for line in table.rows if line.title == title and not line.is_subset] for title in titles
    }
    return [(title, statistics.macro_average(rights)) for title, rights in held.items() if len(rights) > 1]


def compare_to_baseline(table: ReasoningTable) -> list[RunComparison]:
    """Every run as trained less the one it is compared with, on each set and in the mean, with Holm's correction."""
    runs = dict.fromkeys(line.run for line in table.rows if line.run != table.baseline)
    found: list[tuple[str, str, Difference, float | None]] = []
    for run in runs if table.baseline else ():
        pairs = [(name, *pair) for name in table.datasets if (pair := paired_scores(table, name, run))]
        found += [(name, run, statistics.paired_difference(a, b), mcnemar_if_single(a, b)) for name, a, b, _ in pairs]
        whole = [(a, b) for _, a, b, part in pairs if not part]
        if len(whole) > 1:
            found.append((MEAN_TITLE, run, statistics.macro_paired_difference(*zip(*whole, strict=True)), None))
    claims = statistics.find_significant([difference for _, _, difference, _ in found])
    return [
        RunComparison(name, run, str(table.baseline), d, claim, statistics.describe_difference(d, claim), p)
        for (name, run, d, p), claim in zip(found, claims, strict=True)
    ]


def paired_scores(table: ReasoningTable, name: str, run: str) -> tuple[ScoreMatrix, ScoreMatrix, bool] | None:
    """What two runs have right on a set: those of equal seeds, else in their order; and whether it is a part."""
    lines = {line.run: line for line in table.rows_of(name) if not line.condition}
    if run not in lines or table.baseline not in lines:
        return None
    a, b = lines[run], lines[table.baseline]
    both = [seed for seed in a.seeds if seed in b.seeds]
    if both:
        return a.correct[[a.seeds.index(s) for s in both]], b.correct[[b.seeds.index(s) for s in both]], a.is_subset
    n = min(len(a.seeds), len(b.seeds))
    return a.correct[:n], b.correct[:n], a.is_subset


def mcnemar_if_single(a: ScoreMatrix, b: ScoreMatrix) -> float | None:
    """McNemar's p where both are one run."""
    return statistics.mcnemar_p_value(a[0], b[0]) if len(a) == 1 else None


def format_headline(estimate: Estimate) -> str:
    """The accuracy; a ± needs three seeds, fewer are named."""
    return (
        format_accuracy(estimate)
        if estimate.num_seeds >= MIN_SEEDS
        else f"{format_accuracy(estimate)} (n={estimate.num_seeds})"
    )


COLUMNS = ("", "accuracy", "95 % interval", "first pass", "think", "answer", "passes", "positions", "KiB", "papers")
TIMING_COLUMNS = ("ms", "ms 90 %", "a second")


def build_table(table: ReasoningTable) -> Any:
    """The table for a terminal: a block for each set, its floor on top."""
    from rich.table import Table as Made

    timed = any(line.latency for line in table.rows)
    made = Made(box=None, pad_edge=False, header_style="")
    for i, name in enumerate((*COLUMNS, *(TIMING_COLUMNS if timed else ()))):
        made.add_column(name, justify="right" if i else "left", no_wrap=True)
    for name in table.datasets:
        lines = table.rows_of(name)
        answer, share = lines[0].results[0].majority_baseline
        n = lines[0].accuracy.num_items
        made.add_row(f"{name}: {n:,} questions")
        made.add_row(f"  always “{answer}”", f"{format_percent(share)} %")
        for line in lines:
            made.add_row(f"  {line.title}", *row_cells(line, timed))
    for i, (title, found) in enumerate(macro_averages(table)):
        if not i:
            made.add_row(MEAN_TITLE)
        made.add_row(f"  {title}", format_headline(found), format_interval(found))
    return made


def row_cells(line: ReasoningRow, is_timed: bool) -> list[str]:
    """A row of the table."""
    read, place, think, answer = line.mean_passes
    begin, end = line.mean_cache_positions
    found = [
        format_headline(line.accuracy), format_interval(line.accuracy), *map(format_count, (read + place, think, answer, sum(line.mean_passes))),
        f"{format_count(begin)} → {format_count(end)}", f"{line.cache_bytes / 1024:,.1f}", format_paper_figures(line.paper_figures),
    ]  # fmt: skip
    if not is_timed:
        return found
    took, many = line.latency, line.throughput
    ms = ["–", "–"] if took is None else [f"{took.median:.1f}", f"{took.p90:.1f}"]
    return [*found, *ms, "–" if many is None else f"{many.questions_per_second:.1f}"]


def format_footnotes(table: ReasoningTable) -> str:
    """What stands under the table."""
    head = [f"protocol {table.protocol}; passes and positions are means of a question; KiB of the cache at its end"]
    compared = compare_to_baseline(table)
    against = [
        f"  {c.dataset}: {c.run} against {c.baseline}: {c.text}"
        + (f"; McNemar p {c.mcnemar_p:.3g}" if c.mcnemar_p is not None else "")
        for c in compared
    ]
    return "\n".join([*head, *(["", "differences, Holm's correction over all"] if against else []), *against, "",
                      *list_caveats(table), *table.notes, *(f"{name}: {text}" for name, text in table.facts)])  # fmt: skip


def list_caveats(table: ReasoningTable) -> list[str]:
    """What these figures do not show."""
    found: list[str] = []
    few = sorted({line.accuracy.num_seeds for line in table.rows if line.accuracy.num_seeds < MIN_SEEDS})
    if few:
        found.append(f"n={few[0]}: the intervals are of these runs; another seed may fall outside them")
    for line in table.rows:
        chain = next(
            (c for c in table.rows_of(line.dataset) if (c.run, c.condition) == (line.run, COT_CONDITION)), None
        )
        if line.condition or line.is_subset or chain is None:
            continue
        saved = sum(line.mean_passes) < sum(chain.mean_passes)
        if line.mean_cache_positions[1] >= chain.mean_cache_positions[1]:
            text = f"{format_count(line.mean_cache_positions[1])} positions, {format_count(chain.mean_cache_positions[1])} with the chain"
            alone = "; only passes are saved" if saved else ""
            found.append(f"{line.dataset}: the cache of {line.run} is not shorter: {text}{alone}")
        if not saved:
            text = f"{format_count(sum(line.mean_passes))} a question, {format_count(sum(chain.mean_passes))} with the chain"
            found.append(f"{line.dataset}: no passes are saved by {line.run}: {text}")
    for line in table.rows:
        if line.latency and line.throughput:
            found += [
                f"{line.dataset}: {text}"
                for text in timing_caveats(line.accuracy.num_items, line.latency, line.throughput)
            ]
    return list(dict.fromkeys(found))


def table_to_json(table: ReasoningTable) -> dict[str, Any]:
    """The figures as JSON holds them."""
    sets = [
        {
            "set": name,
            "questions": (lines := table.rows_of(name))[0].accuracy.num_items,
            "floor": dict(zip(("answer", "share"), lines[0].results[0].majority_baseline, strict=True)),
            "part": lines[0].is_subset,
            "runs": [row_to_json(line) for line in lines],
        }
        for name in table.datasets
    ]
    compared = [
        {"set": c.dataset, "run": c.run, "against": c.baseline, **c.difference._asdict()}
        | {"claim": c.is_significant, "text": c.text, "mcnemar": c.mcnemar_p}
        for c in compare_to_baseline(table)
    ]
    return {
        "schema": 1,
        "protocol": table.protocol,
        "sets": sets,
        "means": [{"run": title, "accuracy": found._asdict()} for title, found in macro_averages(table)],
        "differences": compared,
        "limits": list_caveats(table),
        "notes": list(table.notes),
        "facts": dict(table.facts),
    }


def row_to_json(line: ReasoningRow) -> dict[str, Any]:
    """One line as JSON holds it."""
    read, place, *_ = line.mean_passes
    return {
        "run": line.run,
        "way": line.condition or "as trained",
        "seeds": list(line.seeds),
        "accuracy": line.accuracy._asdict(),
        "unanswered": sum(answer.prediction is None for result in line.results for answer in result.records),
        "passes": dict(zip(PassCounts._fields, line.mean_passes, strict=True))
        | {"first": read + place, "total": sum(line.mean_passes)},
        "held": {"begin": line.mean_cache_positions[0], "end": line.mean_cache_positions[1], "bytes": line.cache_bytes},
        "papers": None
        if line.paper_figures is None
        else [each._asdict() for each in line.paper_figures] or "not known",
        "milliseconds": line.latency and line.latency._asdict(),
        "per_second": line.throughput and line.throughput.questions_per_second,
        "at_once": line.throughput and line.throughput.batch_size,
    }
