"""Inspect a set of questions: answers under interventions, and what a logit lens shows of the thoughts.

The answers of several runs become tables for a terminal and for a page, and JSON.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.console import ProgressFn
from laconic.evaluation.inspection.conditions import (
    answer_under_conditions,
    count_latents,
    limit_iterations,
    list_replacements,
    load_batch,
    reference_means_of,
)
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.interventions import choose_donors
from laconic.evaluation.inspection.logit_lens import lcs_ratio, share_in_chain, top_token_ids
from laconic.evaluation.inspection.verdict import AS_TRAINED, ThoughtAudit, build_audit_table, explain_columns
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.evaluation.reasoning.table import ReasoningRow
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.statistics import (
    Difference,
    Estimate,
    estimate_proportion,
    format_difference,
    paired_difference,
)
from laconic.evaluation.tables import Table, figures_to_json, format_interval, format_percent

TokenIds = Sequence[int]
CHAIN_WORDS_NOTE = (
    "Latents whose most likely token after the last pass occurs in the question's chain; in the chain of another "
    "question, which is chance; and the share of the chain that they name in its order."
)


@dataclass(frozen=True)
class DatasetInspection:
    """A run over a set. `chain_word_rates` [N, 3] has for each question the share of latents whose top token is in the
    chain, the same for the chain of another question, and the LCS ratio; NaN without a chain.
    """

    name: str
    method: str
    audit: ThoughtAudit
    by_iterations: dict[int, Estimate]
    trained_iterations: int | None
    chain_word_rates: NDArray[np.float64]


def inspect_dataset(
    run: InspectedRun,
    questions: QuestionSet,
    *,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 64,
    progress: ProgressFn | None = None,
) -> DatasetInspection:
    """Ask `limit` questions as trained, under each intervention, and with other numbers of Jacobi iterations.

    The first `NUM_REFERENCE_QUESTIONS` questions of the set are the reference of "mean".
    """
    source = questions.source
    questions = replace(questions, examples=questions.examples[:limit])
    num_questions = len(questions.examples)
    means = reference_means_of(run, source, batch_size)
    M = count_latents(run, source)
    T = run.num_iterations
    interventions = list_replacements(M)
    limits = {} if T is None else {n: f"{n} iterations" for n in sorted({*range(T + 3), M})}
    conditions = {**interventions, **{name: partial(limit_iterations, n=n) for n, name in limits.items()}}
    items, top_ids, chain_ids = list[EvalItem](), list[TokenIds](), list[TokenIds]()
    for start in range(0, num_questions, batch_size):
        indices = np.arange(start, min(start + batch_size, num_questions))
        items += answer_under_conditions(run, questions, conditions, indices.tolist(), means, seed)
        batch = load_batch(run, source, indices)
        with torch.no_grad():
            top_ids += top_token_ids(run.think(batch), run.decoder.logits)
        chain_ids += [ids[mask].tolist() for ids, mask in zip(batch.chain_ids, batch.chain_mask, strict=True)]
        if progress:
            progress(run.name, int(indices[-1]) + 1, num_questions)
    by_iterations = {
        n: estimate_proportion([item.conditions[name]["is_correct"] for item in items]) for n, name in limits.items()
    }
    names = (AS_TRAINED, *interventions)  # tests are of these alone
    items = [EvalItem(item.id, {name: item.conditions[name] for name in names}) for item in items]
    row = ReasoningRow(
        dataset=questions.name,
        run=run.name,
        condition="",
        seeds=(0,),
        items_by_seed=[items],
        protocol=questions.protocol.name,
    )
    rates = compute_chain_word_rates(top_ids, chain_ids, seed)
    return DatasetInspection(
        run.name,
        run.method,
        audit=ThoughtAudit(row),
        by_iterations=by_iterations,
        trained_iterations=T,
        chain_word_rates=rates,
    )


def compute_chain_word_rates(
    top_ids: Sequence[TokenIds], chain_ids: Sequence[TokenIds], seed: int
) -> NDArray[np.float64]:
    """Return `DatasetInspection.chain_word_rates`, [N, 3]."""
    rates = np.full((len(chain_ids), 3), np.nan)
    with_chain = [i for i, chain in enumerate(chain_ids) if chain]
    if len(with_chain) < 2:
        return rates
    for i, other in zip(with_chain, choose_donors(len(with_chain), seed).tolist(), strict=True):
        top = top_ids[i]
        chain = chain_ids[i]
        other_chain = chain_ids[with_chain[other]]
        rates[i] = share_in_chain(top, chain), share_in_chain(top, other_chain), lcs_ratio(top, chain)
    return rates


@dataclass(frozen=True)
class DatasetSummary:
    """A set of questions as each run answers it; the first run is the inspected one, the others are baselines."""

    runs: Sequence[DatasetInspection]
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()

    @property
    def first_row(self) -> ReasoningRow:
        """The answers of the first run as trained; all runs answered the same questions."""
        return self.runs[0].audit.row


class ChainWordRates(NamedTuple):
    """Means of `DatasetInspection.chain_word_rates` over some questions."""

    questions: int
    share_in_chain: float
    share_in_other_chain: float
    lcs_ratio: float


def describe_set(summary: DatasetSummary) -> str:
    row = summary.first_row
    answer, floor = row.majority_baseline
    return (
        f"{row.accuracy.num_items:,} questions of {row.dataset}, protocol {row.protocol}; majority baseline "
        f"{format_percent(floor)} % (always “{answer}”)"
    )


def dataset_tables(summary: DatasetSummary) -> list[tuple[str, Table, str]]:
    """Return titles and tables, without empty ones, and what to know to read each."""
    tables = [
        ("Accuracy under interventions", effects_table(summary), ". ".join(explain_columns(summary.runs[0].audit))),
        ("Jacobi iterations at test time", iterations_table(summary), ""),
        ("Tokens named by latents", chain_words_table(summary), CHAIN_WORDS_NOTE),
    ]
    return [(title, table, note) for title, table, note in tables if table.rows]


def subtract_effects(run: DatasetInspection, first: DatasetInspection) -> list[Difference]:
    """Return the change of accuracy under each intervention minus that of another run, paired by question."""

    def change(inspection: DatasetInspection, name: str) -> Any:
        return inspection.audit.correct_under(name) - inspection.audit.row.correct

    return [paired_difference(change(run, name), change(first, name)) for name in run.audit.conditions]


def effects_table(summary: DatasetSummary) -> Table:
    first = summary.runs[0]
    rows: list[list[str]] = []
    tables = [build_audit_table(run.audit) for run in summary.runs]
    for run, table in zip(summary.runs, tables, strict=True):
        differences = [] if run is first else map(format_difference, subtract_effects(run, first))
        rows += [[run.name, *row, x] for row, x in zip_longest(table.rows, ["", *differences], fillvalue="")]
    header = ["run", *tables[0].header, *([f"minus {first.name}'s"] if len(tables) > 1 else [])]
    return Table(header, [row[: len(header)] for row in rows], num_text_columns=1 + tables[0].num_text_columns)


def iterations_table(summary: DatasetSummary) -> Table:
    def format_cell(run: DatasetInspection, n: int) -> str:
        if n not in run.by_iterations:
            return ""
        accuracy = run.by_iterations[n]
        mark = " as trained" if n == run.trained_iterations else ""
        return f"{format_percent(accuracy.mean)} ({format_interval(accuracy)}){mark}"

    numbers = sorted({n for run in summary.runs for n in run.by_iterations})
    rows = [[str(n), *(format_cell(run, n) for run in summary.runs)] for n in numbers]
    return Table(["iterations", *(f"{run.name}, correct, %" for run in summary.runs)], rows)


def chain_words_table(summary: DatasetSummary) -> Table:
    rows = [
        [run.name, name, str(rates.questions), *map(format_percent, rates[1:])]
        for run in summary.runs
        for name, rates in chain_word_rates(run).items()
    ]
    header = ["run", "answers", "questions", "own chain, %", "another's, %", "in order, %"]
    return Table(header, rows, num_text_columns=2)


def chain_word_rates(run: DatasetInspection) -> dict[str, ChainWordRates]:
    """Return how often latents name tokens of their chain, for correct answers, wrong ones and all."""
    is_correct = run.audit.row.correct[0] > 0
    has_chain = ~np.isnan(run.chain_word_rates[:, 0])
    groups = {"correct": has_chain & is_correct, "wrong": has_chain & ~is_correct, "all": has_chain}
    return {
        name: ChainWordRates(int(some.sum()), *run.chain_word_rates[some].mean(0).tolist())
        for name, some in groups.items()
        if some.any()
    }


def list_caveats(summary: DatasetSummary) -> list[str]:
    floor = summary.first_row.majority_baseline.share
    accuracies = [(run.name, run.audit.row.accuracy) for run in summary.runs]
    caveats = [
        f"{name} is not shown to be above the majority baseline ({format_percent(accuracy.mean)} % correct, baseline "
        f"{format_percent(floor)} %): an intervention that costs nothing then says nothing."
        for name, accuracy in accuracies
        if accuracy.low <= floor
    ]
    return [*caveats, *summary.notes]


def dataset_to_json(summary: DatasetSummary) -> dict[str, Any]:
    first = summary.runs[0]
    row = summary.first_row
    data = {
        "schema": 4,
        "dataset": row.dataset,
        "questions": row.accuracy.num_items,
        "protocol": row.protocol,
        "majority_baseline": row.majority_baseline,
        "runs": [
            {
                "run": run.name,
                "method": run.method,
                "accuracy": run.audit.row.accuracy,
                "conditions": run.audit.effects,
                "differences_to_first": [] if run is first else subtract_effects(run, first),
                "iterations": {str(n): accuracy for n, accuracy in run.by_iterations.items()},
                "trained_iterations": run.trained_iterations,
                "chain_words": chain_word_rates(run),
            }
            for run in summary.runs
        ],
        "notes": list_caveats(summary),
    }
    return figures_to_json(data)
