"""Inspect a set of questions: answers with and without interventions, logit lens, KV similarity and selection."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.batches import AnswerBatch, ReasoningBatch, ReasoningExample
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.errors import InputError
from laconic.evaluation.inspection import interventions, kv_selection, kv_similarity
from laconic.evaluation.inspection.inspected_run import InspectedRun, latent_keys_values
from laconic.evaluation.inspection.interventions import InterventionInputs, InterventionSpec, ReferenceMeans
from laconic.evaluation.inspection.kv_selection import ChainSelection, SelectorStatistics
from laconic.evaluation.inspection.logit_lens import lcs_ratio, share_in_chain, top_token_ids
from laconic.evaluation.reasoning.evaluate import match_answers
from laconic.evaluation.reasoning.question_sets import QuestionSet
from laconic.evaluation.results_store import ProgressCallback
from laconic.evaluation.statistics import ScoreMatrix
from laconic.interfaces import TrainingData
from laconic.latent.rollout import LatentRollout

MIN_REFERENCE_QUESTIONS = 256  # for the mean of a latent
MapKey = tuple[str, str]  # space and baseline of a similarity map


@dataclass
class AnswerLog:
    """The predictions for a set's questions, and whether they are correct."""

    predictions: list[str | None] = field(default_factory=list[str | None])
    is_correct: list[bool] = field(default_factory=list[bool])

    def add(self, answers: AnswerBatch, examples: Sequence[ReasoningExample], protocol: AnswerProtocol) -> None:
        """Add the answers to the next questions."""
        for record in match_answers(answers, examples, protocol):
            self.predictions.append(record.prediction)
            self.is_correct.append(record.is_correct)

    @property
    def correct(self) -> ScoreMatrix:
        """1 for each correct answer, [N]."""
        return np.array(self.is_correct, dtype=np.float64)


@dataclass
class DatasetInspection:
    """A run over a set: answers without intervention, under each, and with other numbers of Jacobi iterations.

    `donors` are the indices of the questions that donate to each, for "swap". `chain_word_rates` has for each question
    the share of latents whose top token is in the chain, the same for the chain of another question, and the LCS ratio;
    NaN without a chain. `map_statistics` are diagonal contrast and look-ahead of each similarity map, for each chain;
    `mean_maps` are means with the selected tokens, over `num_full_chains` chains that fill all latents. Unreduced
    chains are those that are selected whole.
    """

    name: str
    method: str
    baseline: AnswerLog
    by_intervention: dict[InterventionSpec, AnswerLog]
    by_iterations: dict[int, AnswerLog]
    donors: NDArray[np.int64] | None
    trained_iterations: int | None
    chain_word_rates: NDArray[np.float64]
    map_statistics: Mapping[MapKey, NDArray[np.float64]]
    mean_maps: Mapping[MapKey, NDArray[np.float64]]
    selector_statistics: tuple[SelectorStatistics, ...]
    num_unreduced_chains: int = 0
    num_full_chains: int = 0

    def changed_to_donor(self, spec: InterventionSpec, protocol: AnswerProtocol) -> NDArray[np.float64]:
        """Return whether each answer under an intervention is the donor's, where the donor's was different."""
        if self.donors is None:
            return np.zeros(0)
        changed: list[bool] = []
        baseline, predictions = self.baseline.predictions, self.by_intervention[spec].predictions
        for before, after, i in zip(baseline, predictions, self.donors.tolist(), strict=True):
            donor = baseline[i]
            if donor is not None and not (before is not None and protocol.is_correct(before, donor)):
                changed.append(after is not None and protocol.is_correct(after, donor))
        return np.array(changed, dtype=np.float64)


@dataclass
class InspectionAccumulator:
    """What is gathered batch by batch."""

    top_ids: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    chain_ids: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    map_statistics: dict[MapKey, list[tuple[float, float]]] = field(
        default_factory=dict[MapKey, list[tuple[float, float]]]
    )
    mean_maps: dict[MapKey, list[NDArray[np.float64]]] = field(default_factory=dict[MapKey, list[NDArray[np.float64]]])
    selections: list[tuple[tuple[str, ...], tuple[ChainSelection, ...]]] = field(
        default_factory=list[tuple[tuple[str, ...], tuple[ChainSelection, ...]]]
    )


@torch.no_grad()
def inspect_dataset(
    run: InspectedRun,
    questions: QuestionSet,
    specs: Sequence[InterventionSpec],
    *,
    limit: int | None = None,
    iterations: Sequence[int] = (),
    seed: int = 0,
    batch_size: int = 64,
    progress: ProgressCallback | None = None,
) -> DatasetInspection:
    """Ask every question as trained, under each intervention, and with other numbers of Jacobi iterations.

    Args:
        run: Run to inspect.
        questions: The set, whose first `MIN_REFERENCE_QUESTIONS` questions are the reference of "mean".
        specs: Interventions to answer under.
        limit: Ask only so many questions.
        iterations: Numbers of Jacobi iterations.
        seed: Seed of the donors and of shuffling.
        batch_size: Questions that are answered together.
        progress: Called after each batch.

    Raises:
        InputError: There are too few questions for "mean".
        UsageError: An intervention is not possible.
    """
    source, protocol, examples = questions.source, questions.protocol, questions.examples[:limit]
    kinds = {spec.kind for spec in specs}
    donors = interventions.choose_donors(len(examples), seed) if "swap" in kinds else None
    means = reference_means_of(run, source, batch_size) if "mean" in kinds else None
    baseline, accumulator = AnswerLog(), InspectionAccumulator()
    by_intervention = {spec: AnswerLog() for spec in specs}
    by_iterations = {n: AnswerLog() for n in iterations}
    for start in range(0, len(examples), batch_size):
        indices = np.arange(start, min(start + batch_size, len(examples)))
        batch, batch_examples = load_batch(run, source, indices), [examples[i] for i in indices.tolist()]
        rollout = run.think(batch, record_passes=True)
        baseline.add(run.answer(batch, rollout), batch_examples, protocol)
        donor_rollout = None
        if donors is not None:
            donor_rollout = run.think(load_batch(run, source, donors[indices]), record_passes=True)
        inputs = InterventionInputs(rollout, indices, seed, donor_rollout, means)
        for spec, log in by_intervention.items():
            changed = interventions.run_intervention(run, batch, spec, inputs)
            log.add(run.answer(batch, changed), batch_examples, protocol)
        for n, log in by_iterations.items():
            log.add(run.answer(batch, run.think(batch, iterations=n)), batch_examples, protocol)
        accumulate(run, batch, rollout, accumulator)
        if progress:
            progress(run.name, int(indices[-1]) + 1, len(examples))
    return DatasetInspection(
        run.name,
        run.method,
        baseline,
        by_intervention,
        by_iterations,
        donors,
        run.num_iterations,
        chain_word_rates=compute_chain_word_rates(accumulator, seed),
        map_statistics={key: np.array(values) for key, values in accumulator.map_statistics.items()},
        mean_maps={key: np.mean(values, axis=0) for key, values in accumulator.mean_maps.items()},
        selector_statistics=kv_selection.compute_selector_statistics(accumulator.selections),
        num_unreduced_chains=sum(bool(values[0].mask.all()) for _, values in accumulator.selections),
        num_full_chains=max((len(values) for values in accumulator.mean_maps.values()), default=0),
    )


def load_batch(run: InspectedRun, source: TrainingData, indices: NDArray[np.int64]) -> ReasoningBatch:
    """Return some rows of a set on the run's device."""
    return cast(ReasoningBatch, source.batch([int(i) for i in indices], 0, 0)).to(run.device)


def reference_means_of(
    run: InspectedRun, source: TrainingData, batch_size: int, num_questions: int | None = None
) -> ReferenceMeans:
    """Return the means over the first rows of a set, 256 by default; `InputError` if it has too few."""
    n = num_questions or MIN_REFERENCE_QUESTIONS
    if len(source) < n:
        raise InputError(
            f"mean needs {n} questions, this set has {len(source)}; give a larger set, or leave mean out of "
            "--interventions"
        )
    indices = np.arange(n)
    batches = (load_batch(run, source, indices[start : start + batch_size]) for start in range(0, n, batch_size))
    return interventions.compute_reference_means(run, batches)


def accumulate(
    run: InspectedRun, batch: ReasoningBatch, rollout: LatentRollout, accumulator: InspectionAccumulator
) -> None:
    """Add the logit lens, the similarity maps and the selections of one batch."""
    accumulator.top_ids += top_token_ids(rollout, run.decoder.logits)
    lengths = batch.chain_mask.sum(1).tolist()
    accumulator.chain_ids += [tuple(ids[:n].tolist()) for ids, n in zip(batch.chain_ids, lengths, strict=True)]
    if run.teacher_chain is None or not any(lengths):
        return
    teacher, slots = run.teacher_chain(batch), latent_keys_values(run.decoder, rollout)
    M = rollout.latents.shape[1]
    for row, n in enumerate(lengths):
        if not n:
            continue
        for space, baseline, layers in kv_similarity.iter_cosines(slots, teacher, row, n):
            mean = layers[list(teacher.matched_layers)].mean(0)
            statistics = (kv_similarity.diagonal_contrast(mean), kv_similarity.look_ahead_share(mean))
            accumulator.map_statistics.setdefault((space, baseline), []).append(statistics)
            if baseline == kv_similarity.SELECTED and n >= M:
                accumulator.mean_maps.setdefault((space, baseline), []).append(mean.double().cpu().numpy())
        classes = kv_selection.classify_tokens(*kv_selection.decode_chain(batch, row, run.decode_token))
        accumulator.selections.append((classes, kv_selection.chain_selections(teacher, row, n)))


def compute_chain_word_rates(accumulator: InspectionAccumulator, seed: int) -> NDArray[np.float64]:
    """Return `DatasetInspection.chain_word_rates`, [N, 3]."""
    rates = np.full((len(accumulator.chain_ids), 3), np.nan)
    with_chain = [i for i, chain in enumerate(accumulator.chain_ids) if chain]
    if len(with_chain) < 2:
        return rates
    for i, other in zip(with_chain, interventions.choose_donors(len(with_chain), seed).tolist(), strict=True):
        top, chain, other_chain = (
            accumulator.top_ids[i],
            accumulator.chain_ids[i],
            accumulator.chain_ids[with_chain[other]],
        )
        rates[i] = share_in_chain(top, chain), share_in_chain(top, other_chain), lcs_ratio(top, chain)
    return rates
