"""Inspect a set of questions: answers under interventions, and what a logit lens shows of the thoughts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.console import ProgressFn
from laconic.evaluation.inspection.conditions import (
    answer_under_conditions,
    count_latents,
    list_replacements,
    load_batch,
    reference_means_of,
)
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.interventions import choose_donors
from laconic.evaluation.inspection.logit_lens import lcs_ratio, share_in_chain, top_token_ids
from laconic.evaluation.inspection.verdict import ThoughtAudit
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.evaluation.reasoning.table import ReasoningRow
from laconic.evaluation.results_store import EvalItem

TokenIds = Sequence[int]


@dataclass(frozen=True)
class DatasetInspection:
    """A run over a set. `chain_word_rates` [N, 3] has for each question the share of latents whose top token is in the
    chain, the same for the chain of another question, and the LCS ratio; NaN without a chain.
    """

    name: str
    method: str
    audit: ThoughtAudit
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
    """Ask `limit` questions as trained and under each intervention.

    The first `NUM_REFERENCE_QUESTIONS` questions of the set are the reference of "mean".
    """
    source, questions = questions.source, replace(questions, examples=questions.examples[:limit])
    num_questions = len(questions.examples)
    means = reference_means_of(run, source, batch_size)
    conditions = list_replacements(count_latents(run, source))
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
    row = ReasoningRow(questions.name, run.name, "", (0,), [items], questions.protocol.name)
    rates = compute_chain_word_rates(top_ids, chain_ids, seed)
    return DatasetInspection(run.name, run.method, ThoughtAudit(row), rates)


def compute_chain_word_rates(
    top_ids: Sequence[TokenIds], chain_ids: Sequence[TokenIds], seed: int
) -> NDArray[np.float64]:
    """Return `DatasetInspection.chain_word_rates`, [N, 3]."""
    rates = np.full((len(chain_ids), 3), np.nan)
    with_chain = [i for i, chain in enumerate(chain_ids) if chain]
    if len(with_chain) < 2:
        return rates
    for i, other in zip(with_chain, choose_donors(len(with_chain), seed).tolist(), strict=True):
        top, chain, other_chain = top_ids[i], chain_ids[i], chain_ids[with_chain[other]]
        rates[i] = share_in_chain(top, chain), share_in_chain(top, other_chain), lcs_ratio(top, chain)
    return rates
