"""Runs on question sets: accuracy and paired comparisons; as a table and as JSON."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from laconic.batches import PassCounts
from laconic.console import pluralize
from laconic.data.reasoning.answer_matching import describe_protocol
from laconic.errors import InputError
from laconic.evaluation import statistics, tables
from laconic.evaluation.example_answers import NUM_EXAMPLES, ExampleAnswer, ExampleQuestion, format_examples
from laconic.evaluation.reasoning.evaluate import Latency
from laconic.evaluation.reasoning.run import COT_CONDITION
from laconic.evaluation.report.papers import PaperFigure, find_paper_figures, format_paper_figures
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.statistics import Difference, Estimate, ScoreMatrix, compare_answers, describe_test
from laconic.evaluation.suite import RunResult
from laconic.evaluation.tables import MIN_SEEDS, Column, Table, format_count


class MajorityBaseline(NamedTuple):
    """The most frequent gold answer and its share: the accuracy of always giving it."""

    answer: str
    share: float


@dataclass(frozen=True)
class ReasoningRow:
    """A run on one question set under one condition, over its seeds.

    The condition is empty as trained. Items have the fields of an `AnswerRecord`. A subset is a part of another set.
    `paper_figures` are None for a recipe of no paper. `may_overlap` says that the recipe accepts held-out questions in
    its training rows.
    """

    dataset: str
    run: str
    condition: str
    seeds: tuple[int, ...]
    items_by_seed: Sequence[Sequence[EvalItem]]
    protocol: str
    bytes_per_position: int = 0
    is_subset: bool = False
    paper_figures: Sequence[PaperFigure] | None = None
    latency: Latency | None = None
    may_overlap: bool = False

    @cached_property
    def correct(self) -> ScoreMatrix:
        """1 for each correct answer, [seeds, questions]."""
        rows = [[item.shared["is_correct"] for item in items] for items in self.items_by_seed]
        return np.array(rows, dtype=np.float64)

    @cached_property
    def accuracy(self) -> Estimate:
        return statistics.estimate_proportion(self.correct)

    @property
    def title(self) -> str:
        return f"{self.run}, {self.condition}" if self.condition else self.run

    @property
    def mean_passes(self) -> tuple[float, ...]:
        """Forward passes per question: prompt, latent setup, latents, answer."""
        return self.mean_over_answers(lambda answer: [answer["passes"][part] for part in PassCounts._fields])

    @property
    def mean_cache_positions(self) -> tuple[float, ...]:
        """Positions in the cache when the answer begins, and at its end."""
        return self.mean_over_answers(lambda answer: answer["cache_positions"])

    def mean_over_answers(self, count: Callable[[Mapping[str, Any]], Sequence[int]]) -> tuple[float, ...]:
        means = [np.mean([count(item.shared) for item in items], axis=0) for items in self.items_by_seed]
        return tuple(np.mean(means, axis=0).tolist())

    @property
    def cache_bytes(self) -> float:
        return self.mean_cache_positions[1] * self.bytes_per_position

    @property
    def majority_baseline(self) -> MajorityBaseline:
        answer, count = Counter(item.shared["gold"] for item in self.items_by_seed[0]).most_common(1)[0]
        return MajorityBaseline(answer, count / len(self.items_by_seed[0]))

    def costs_to_json(self) -> dict[str, Any]:
        begin, end = self.mean_cache_positions
        return {
            "accuracy": self.accuracy._asdict(),
            "passes": dict(zip(PassCounts._fields, self.mean_passes, strict=True)) | {"total": sum(self.mean_passes)},
            "cache_positions": {"begin": begin, "end": end, "bytes": self.cache_bytes},
        }


class RowComparison(NamedTuple):
    """A row minus another on the same set, if that is significant after Holm's correction, and in words."""

    row: ReasoningRow
    other: ReasoningRow
    difference: Difference
    is_significant: bool
    text: str

    def to_json(self) -> dict[str, Any]:
        return {**self.difference._asdict(), "is_significant": self.is_significant, "text": self.text}


@dataclass(frozen=True)
class ReasoningTable:
    """Runs on question sets, with one protocol; `baseline` names the run that the others are compared with.

    Raises `InputError` if rows of one set are not about the same questions.
    """

    rows: Sequence[ReasoningRow]
    baseline: str | None = None
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = field(default_factory=tuple[str, ...])

    @property
    def protocol(self) -> str:
        return self.rows[0].protocol

    @cached_property
    def by_dataset(self) -> dict[str, list[ReasoningRow]]:
        names = dict.fromkeys(row.dataset for row in self.rows)
        return {name: [row for row in self.rows if row.dataset == name] for name in names}

    @property
    def examples(self) -> list[ExampleQuestion]:
        """The first questions of each set, with the answers of every run; of several seeds, the first."""
        examples: list[ExampleQuestion] = []
        for name, rows in self.by_dataset.items():
            if rows[0].is_subset:
                continue
            for items in islice(zip(*(row.items_by_seed[0] for row in rows), strict=True), NUM_EXAMPLES):
                answers = [item.shared for item in items]
                titled = [
                    ExampleAnswer(row.title, answer["output"], answer["is_correct"])
                    for row, answer in zip(rows, answers, strict=True)
                ]
                examples.append(ExampleQuestion(name, answers[0]["question"], answers[0]["gold"], tuple(titled)))
        return examples

    def __post_init__(self) -> None:
        for name, rows in self.by_dataset.items():
            questions = {
                tuple((item.shared["question"], item.shared["gold"]) for item in items)
                for row in rows
                for items in row.items_by_seed
            }
            if len(questions) > 1:
                runs = " and ".join(dict.fromkeys(row.run for row in rows))
                raise InputError(f"{name}: {runs} answered different questions; name a set that is the same for all")


def build_rows(result: RunResult, latency: Latency | None = None) -> list[ReasoningRow]:
    """Return the row of a run on a set; a second row has GSM-Hard's changed questions only, where some are not."""
    info = result.info
    figures = result.figures[0]
    condition = result.variant.get("condition", "")
    is_comparable = result.limit is None and not condition
    papers = find_paper_figures(info["paper_table"], info["table_row"], result.task) if is_comparable else None
    row = ReasoningRow(
        dataset=result.task,
        run=result.run,
        condition=condition,
        seeds=result.seeds,
        items_by_seed=result.items_by_seed,
        protocol=figures["protocol"],
        bytes_per_position=figures["bytes_per_position"],
        paper_figures=papers,
        latency=latency,
        may_overlap=info["allow_contamination"],
    )
    unchanged = set(figures.get("unchanged", ()))
    changed = [[item for item in items if item.id not in unchanged] for items in result.items_by_seed]
    if not unchanged or not changed[0]:
        return [row]
    others = {"is_subset": True, "paper_figures": None, "latency": None, "may_overlap": False}
    return [row, replace(row, dataset=f"{result.task}, changed", items_by_seed=changed, **others)]


def compare_to_baseline(table: ReasoningTable) -> list[RowComparison]:
    trained = {(row.dataset, row.run): row for row in table.rows if not row.condition}
    return compare_rows(
        [
            (trained[name, run], trained[name, str(table.baseline)])
            for run in dict.fromkeys(run for _, run in trained if table.baseline and run != table.baseline)
            for name in table.by_dataset
            if {(name, run), (name, table.baseline)} <= trained.keys()
        ]
    )


def compare_rows(pairs: Sequence[tuple[ReasoningRow, ReasoningRow]]) -> list[RowComparison]:
    """Return each first row minus the second, with Holm's correction over all."""
    differences = [compare_answers(*pair_seeds(a, b)) for a, b in pairs]
    tests = zip(pairs, differences, statistics.find_significant(differences), strict=True)
    return [RowComparison(*pair, d, x, statistics.describe_difference(d, x)) for pair, d, x in tests]


def pair_seeds(a: ReasoningRow, b: ReasoningRow) -> tuple[ScoreMatrix, ScoreMatrix]:
    """Return the scores of two rows: of equal seeds; of the first ones in order if there is no common seed."""
    both = [seed for seed in a.seeds if seed in b.seeds]
    if both:
        return a.correct[[a.seeds.index(s) for s in both]], b.correct[[b.seeds.index(s) for s in both]]
    n = min(len(a.seeds), len(b.seeds))
    return a.correct[:n], b.correct[:n]


def format_headline(estimate: Estimate) -> str:
    text = tables.format_accuracy(estimate)
    return text if estimate.num_seeds >= MIN_SEEDS else f"{text} ({pluralize(estimate.num_seeds, 'seed')})"


COLUMNS = (
    Column("", lambda row: row.title, is_text=True),
    Column("accuracy", lambda row: format_headline(row.accuracy)),
    Column("95 % interval", lambda row: tables.format_interval(row.accuracy)),
    Column("first pass", lambda row: format_count(sum(row.mean_passes[:2]))),
    Column("latent", lambda row: format_count(row.mean_passes[2])),
    Column("answer", lambda row: format_count(row.mean_passes[3])),
    Column("passes", lambda row: format_count(sum(row.mean_passes))),
    Column("positions", lambda row: " → ".join(map(format_count, row.mean_cache_positions))),
    Column("KiB", lambda row: f"{row.cache_bytes / 1024:,.1f}"),
    Column("papers", lambda row: format_paper_figures(row.paper_figures)),
)
LATENCY_COLUMN = Column("ms", lambda row: "–" if row.latency is None else f"{row.latency.median:.1f}")


def list_columns(table: ReasoningTable) -> tuple[Column, ...]:
    return (*COLUMNS, LATENCY_COLUMN) if any(row.latency for row in table.rows) else COLUMNS


def rows_by_dataset(table: ReasoningTable) -> list[tuple[str, list[list[str]]]]:
    """Return title and cells of each question set, the majority baseline first."""
    columns = list_columns(table)
    blocks: list[tuple[str, list[list[str]]]] = []
    for name, rows in table.by_dataset.items():
        answer, share = rows[0].majority_baseline
        cells = [[f"always “{answer}”", f"{tables.format_percent(share)} %", *[""] * (len(columns) - 2)]]
        cells += [[column.format(row) for column in columns] for row in rows]
        blocks.append((f"{name}: {rows[0].accuracy.num_items:,} questions", cells))
    return blocks


def build_terminal_table(table: ReasoningTable) -> Table:
    rows: list[list[str]] = []
    for title, cells in rows_by_dataset(table):
        rows += [[title], *([f"  {first}", *rest] for first, *rest in cells)]
    return Table([column.title for column in list_columns(table)], rows)


def format_footnotes(table: ReasoningTable) -> str:
    lines = [
        f"protocol {describe_protocol(table.protocol)}; passes and positions are means per question; KiB: the cache at "
        "the answer's end"
    ]
    if compared := compare_to_baseline(table):
        tests = dict.fromkeys(describe_test(c.difference.num_seeds) for c in compared)
        lines += ["", f"differences: 95 % interval; p: {' or '.join(tests)}, Holm's correction over all"]
        lines += [
            f"  {c.row.dataset}: {c.row.run} against {c.other.run}: {c.text}; p {c.difference.p:.3g}" for c in compared
        ]
    lines += ["", *format_examples(table.examples)]
    return "\n".join([*lines, "", *list_caveats(table), *table.notes, *(f"{k}: {v}" for k, v in table.facts)])


def list_caveats(table: ReasoningTable) -> list[str]:
    caveats: list[str] = []
    few = sorted({row.accuracy.num_seeds for row in table.rows if row.accuracy.num_seeds < MIN_SEEDS})
    if few:
        seeds = pluralize(few[0], "seed")
        caveats.append(f"{seeds}: the intervals are about these weights; a run with another seed may fall outside them")
    for row in table.rows:
        if row.may_overlap:
            caveats.append(f"{row.run}: may have trained on these questions: its recipe sets data.allow_contamination")
        cot = next((x for x in table.by_dataset[row.dataset] if (x.run, x.condition) == (row.run, COT_CONDITION)), None)
        if not (row.condition or row.is_subset or cot is None):
            caveats += [f"{row.dataset}: {text}" for text in compare_costs(row, cot, row.run)]
    return list(dict.fromkeys(caveats))


def compare_costs(row: ReasoningRow, cot: ReasoningRow, name: str) -> Iterator[str]:
    """Yield which costs the row of that name does not save against answers with the chain written out."""
    passes, cot_passes = sum(row.mean_passes), sum(cot.mean_passes)
    positions, cot_positions = row.mean_cache_positions[1], cot.mean_cache_positions[1]
    if positions >= cot_positions:
        only = "; only passes are saved" if passes < cot_passes else ""
        counts = f"{format_count(positions)} positions, {format_count(cot_positions)} {COT_CONDITION}"
        yield f"the cache of {name} is not shorter: {counts}{only}"
    if passes >= cot_passes:
        yield f"{name} saves no passes: {format_count(passes)} per question, {format_count(cot_passes)} {COT_CONDITION}"


def table_to_json(table: ReasoningTable) -> dict[str, Any]:
    datasets = [
        {
            "dataset": name,
            "questions": rows[0].accuracy.num_items,
            "majority_baseline": rows[0].majority_baseline,
            "is_subset": rows[0].is_subset,
            "runs": list(map(row_to_json, rows)),
        }
        for name, rows in table.by_dataset.items()
    ]
    comparisons = [
        {"dataset": c.row.dataset, "run": c.row.run, "baseline": c.other.run, **c.to_json()}
        for c in compare_to_baseline(table)
    ]
    data = {
        "schema": 2,
        "protocol": table.protocol,
        "datasets": datasets,
        "comparisons": comparisons,
        "examples": table.examples,
        "caveats": list_caveats(table),
        "notes": list(table.notes),
        "facts": dict(table.facts),
    }
    return tables.figures_to_json(data)


def row_to_json(row: ReasoningRow) -> dict[str, Any]:
    papers = None if row.paper_figures is None else row.paper_figures or "not known"
    return {
        "run": row.run,
        "condition": row.condition or "as trained",
        "seeds": list(row.seeds),
        "unanswered": sum(item.shared["prediction"] is None for items in row.items_by_seed for item in items),
        **row.costs_to_json(),
        "papers": papers,
        "milliseconds": row.latency,
    }
