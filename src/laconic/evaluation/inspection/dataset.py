"""Inspect a set of questions: answers with and without interventions, and what a logit lens shows of the thoughts."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.batches import ReasoningBatch
from laconic.console import ProgressFn
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.evaluation.inspection import interventions
from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.interventions import InterventionInputs, InterventionSpec, ReferenceMeans
from laconic.evaluation.inspection.logit_lens import lcs_ratio, share_in_chain, top_token_ids
from laconic.evaluation.reasoning.evaluate import AnswerRecord, ReasoningResult, match_answers
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.interfaces import TrainingData

NUM_REFERENCE_QUESTIONS = 256  # for the mean of a latent
TokenIds = tuple[int, ...]


@dataclass
class DatasetInspection:
    """A run over a set: answers without intervention, under each, and with other numbers of Jacobi iterations.

    `donors` are the indices of the questions that donate to each, for "swap". `chain_word_rates` has for each question
    the share of latents whose top token is in the chain, the same for the chain of another question, and the LCS ratio;
    NaN without a chain.
    """

    name: str
    method: str
    baseline: ReasoningResult
    by_intervention: dict[InterventionSpec, ReasoningResult]
    by_iterations: dict[int, ReasoningResult]
    donors: NDArray[np.int64]
    trained_iterations: int | None
    chain_word_rates: NDArray[np.float64]

    def changed_to_donor(self, spec: InterventionSpec, protocol: AnswerProtocol) -> NDArray[np.float64]:
        """Return whether each answer under an intervention is the donor's, where the donor's was different."""
        changed: list[bool] = []
        results = (self.baseline, self.by_intervention[spec])
        baseline, predictions = ([record.prediction for record in result.records] for result in results)
        for before, after, i in zip(baseline, predictions, self.donors.tolist(), strict=True):
            donor = baseline[i]
            if donor is not None and not (before is not None and protocol.is_correct(before, donor)):
                changed.append(after is not None and protocol.is_correct(after, donor))
        return np.array(changed, dtype=np.float64)


@torch.no_grad()
def inspect_dataset(
    run: InspectedRun,
    questions: QuestionSet,
    *,
    limit: int | None = None,
    iterations: Sequence[int] = (),
    seed: int = 0,
    batch_size: int = 64,
    progress: ProgressFn | None = None,
) -> DatasetInspection:
    """Ask every question as trained, under each intervention, and with other numbers of Jacobi iterations.

    Args:
        run: Run to inspect.
        questions: The set, whose first `NUM_REFERENCE_QUESTIONS` questions are the reference of "mean".
        limit: Ask only so many questions.
        iterations: Numbers of Jacobi iterations.
        seed: Seed of the donors and of shuffling.
        batch_size: Questions that are answered together.
        progress: Called after each batch.

    Raises:
        UsageError: There is only one question.
    """
    source, protocol, examples = questions.source, questions.protocol, questions.examples[:limit]
    donors = interventions.choose_donors(len(examples), seed)
    means = reference_means_of(run, source, batch_size)
    baseline, top_ids, chain_ids = list[AnswerRecord](), list[TokenIds](), list[TokenIds]()
    by_intervention = defaultdict[InterventionSpec, list[AnswerRecord]](list)
    by_iterations = defaultdict[int, list[AnswerRecord]](list)
    for start in range(0, len(examples), batch_size):
        indices = np.arange(start, min(start + batch_size, len(examples)))
        batch, batch_examples = load_batch(run, source, indices), [examples[i] for i in indices.tolist()]
        rollout = run.think(batch, record_passes=True)
        baseline += match_answers(run.answer(batch, rollout), batch_examples, protocol)
        donor_rollout = run.think(load_batch(run, source, donors[indices]), record_passes=True)
        inputs = InterventionInputs(rollout, indices, seed, donor_rollout, means)
        for spec in interventions.list_interventions(rollout.latents.shape[1]):
            changed = interventions.run_intervention(run, batch, spec, inputs)
            by_intervention[spec] += match_answers(run.answer(batch, changed), batch_examples, protocol)
        for n in iterations:
            changed = run.think(batch, iterations=n)
            by_iterations[n] += match_answers(run.answer(batch, changed), batch_examples, protocol)
        top_ids += top_token_ids(rollout, run.decoder.logits)
        chain_ids += [tuple(ids[mask].tolist()) for ids, mask in zip(batch.chain_ids, batch.chain_mask, strict=True)]
        if progress:
            progress(run.name, int(indices[-1]) + 1, len(examples))
    return DatasetInspection(
        run.name,
        run.method,
        ReasoningResult(tuple(baseline), protocol.name),
        {spec: ReasoningResult(tuple(records), protocol.name) for spec, records in by_intervention.items()},
        {n: ReasoningResult(tuple(records), protocol.name) for n, records in by_iterations.items()},
        donors,
        run.num_iterations,
        compute_chain_word_rates(top_ids, chain_ids, seed),
    )


def load_batch(run: InspectedRun, source: TrainingData, indices: NDArray[np.int64]) -> ReasoningBatch:
    return cast(ReasoningBatch, source.batch([int(i) for i in indices], 0, 0)).to(run.device)


def reference_means_of(run: InspectedRun, source: TrainingData, batch_size: int) -> ReferenceMeans:
    """Return the means over the first `NUM_REFERENCE_QUESTIONS` rows of a set, or over all if it has fewer."""
    indices = np.arange(min(NUM_REFERENCE_QUESTIONS, len(source)))
    batches = (
        load_batch(run, source, indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)
    )
    return interventions.compute_reference_means(run, batches)


def compute_chain_word_rates(
    top_ids: Sequence[TokenIds], chain_ids: Sequence[TokenIds], seed: int
) -> NDArray[np.float64]:
    """Return `DatasetInspection.chain_word_rates`, [N, 3]."""
    rates = np.full((len(chain_ids), 3), np.nan)
    with_chain = [i for i, chain in enumerate(chain_ids) if chain]
    if len(with_chain) < 2:
        return rates
    for i, other in zip(with_chain, interventions.choose_donors(len(with_chain), seed).tolist(), strict=True):
        top, chain, other_chain = top_ids[i], chain_ids[i], chain_ids[with_chain[other]]
        rates[i] = share_in_chain(top, chain), share_in_chain(top, other_chain), lcs_ratio(top, chain)
    return rates
