"""A run looked into over a set of questions: answers with and without edits, words in thoughts, likeness, selection."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.batches import AnswerBatch, ReasoningBatch, ReasoningExample
from laconic.data.reasoning.answer_matching import AnswerProtocol
from laconic.errors import InputError
from laconic.evaluation.inspection import interventions, kv_selection, kv_similarity
from laconic.evaluation.inspection.interventions import InterventionInputs, InterventionSpec, ReferenceMeans
from laconic.evaluation.inspection.kv_selection import ChainSelection, SelectorStatistics
from laconic.evaluation.inspection.logit_lens import lcs_ratio, share_in_chain, top_token_ids
from laconic.evaluation.inspection.subject import InspectedRun, latent_keys_values
from laconic.evaluation.reasoning.evaluate import match_answers
from laconic.evaluation.statistics import ScoreMatrix
from laconic.interfaces import TrainingData
from laconic.latent.rollout import LatentRollout

MIN_REFERENCE_QUESTIONS = 256  # questions that a mean is taken over, at least
ProgressCallback = Callable[[str, int, int], None]
MapKey = tuple[str, str]  # what is compared, against what


@dataclass
class AnswerLog:
    """What was predicted for each question, and whether it was right."""

    predictions: list[str | None] = field(default_factory=list[str | None])
    is_correct: list[bool] = field(default_factory=list[bool])

    def add(self, answers: AnswerBatch, examples: Sequence[ReasoningExample], protocol: AnswerProtocol) -> None:
        """The answers to the next questions."""
        for row in match_answers(answers, examples, protocol):
            self.predictions.append(row.prediction)
            self.is_correct.append(row.is_correct)

    @property
    def correct(self) -> ScoreMatrix:
        """1 for each right answer, [N]."""
        return np.array(self.is_correct, dtype=np.float64)


@dataclass
class DatasetInspection:
    """A run over a set. `reads` has a row (share of slots whose word the chain holds, the same for the chain of
    another question, longest common subsequence) for each question, NaN where it has no chain or no other question has;
    `figures` (contrast, look-ahead) of each map for each chain; `near` the mean map of slots and kept tokens, of chains
    that fill all slots.
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
    num_unreduced_chains: int = 0  # chains that were kept whole
    num_full_chains: int = 0  # chains that `near` is a mean of

    def changed_to_donor(self, spec: InterventionSpec, protocol: AnswerProtocol) -> NDArray[np.float64]:
        """Whether an edited answer is the one that the donor's question got, where that was another one."""
        if self.donors is None:
            return np.zeros(0)
        found: list[bool] = []
        plain, changed = self.baseline.predictions, self.by_intervention[spec].predictions
        for mine, new, i in zip(plain, changed, self.donors.tolist(), strict=True):
            theirs = plain[i]
            if theirs is not None and not (mine is not None and protocol.is_correct(mine, theirs)):
                found.append(new is not None and protocol.is_correct(new, theirs))
        return np.array(found, dtype=np.float64)


@dataclass
class InspectionAccumulator:
    """What is gathered question by question."""

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
    source: TrainingData,
    examples: Sequence[ReasoningExample],
    protocol: AnswerProtocol,
    specs: Sequence[InterventionSpec],
    *,
    iterations: Sequence[int] = (),
    seed: int = 0,
    batch_size: int = 64,
    progress: ProgressCallback | None = None,
) -> DatasetInspection:
    """Asks every question plainly, under each intervention, and in other numbers of rounds.

    Row i of `source` is question i of `examples`; means are over its first rows, `REFERENCE` of them.
    Raises `BadInput` (66) where it has fewer, `Usage` (2) for an edit that has nothing to go by.
    """
    kinds = {intervention.kind for intervention in specs}
    order = interventions.choose_donors(len(examples), seed) if "swap" in kinds else None
    means = reference_means_of(run, source, batch_size) if "mean" in kinds else None
    plain, collected = AnswerLog(), InspectionAccumulator()
    changed = {intervention: AnswerLog() for intervention in specs}
    swept = {n: AnswerLog() for n in iterations}
    for at in range(0, len(examples), batch_size):
        places = np.arange(at, min(at + batch_size, len(examples)))
        asked, some = load_batch(run, source, places), [examples[i] for i in places.tolist()]
        own = run.think(asked, trace=True)
        plain.add(answer_after_rollout(run, asked, own), some, protocol)
        theirs = run.think(load_batch(run, source, order[places]), trace=True) if order is not None else None
        given = InterventionInputs(own, places, seed, theirs, means)
        for intervention, answered in changed.items():
            answered.add(
                answer_after_rollout(run, asked, interventions.run_intervention(run, asked, intervention, given)),
                some,
                protocol,
            )
        for n, answered in swept.items():
            answered.add(answer_after_rollout(run, asked, run.think(asked, rounds=n)), some, protocol)
        accumulate(run, asked, own, collected)
        if progress:
            progress(run.name, int(places[-1]) + 1, len(examples))
    return build_inspection(run, plain, changed, swept, order, collected, seed)


def build_inspection(
    run: InspectedRun,
    plain: AnswerLog,
    changed: dict[InterventionSpec, AnswerLog],
    swept: dict[int, AnswerLog],
    donors: NDArray[np.int64] | None,
    found: InspectionAccumulator,
    seed: int,
) -> DatasetInspection:
    """What was gathered, question by question or as means."""
    return DatasetInspection(
        run.name, run.method, plain, changed, swept, donors, run.num_iterations,
        chain_word_rates=compute_chain_word_rates(found, seed),
        map_statistics={key: np.array(each) for key, each in found.map_statistics.items()},
        mean_maps={key: np.mean(each, axis=0) for key, each in found.mean_maps.items()},
        selector_statistics=kv_selection.compute_selector_statistics(found.selections),
        num_unreduced_chains=sum(bool(each[0].mask.all()) for _, each in found.selections),
        num_full_chains=max((len(each) for each in found.mean_maps.values()), default=0),
    )  # fmt: skip


def load_batch(run: InspectedRun, source: TrainingData, indices: NDArray[np.int64]) -> Any:
    """Some rows of a set, where the run is."""
    return source.batch([int(i) for i in indices], 0, 0).to(run.device)


def answer_after_rollout(run: InspectedRun, batch: ReasoningBatch, rollout: LatentRollout) -> AnswerBatch:
    """The answers after thoughts."""
    return run.answer_from_cache(batch, rollout.cache, rollout.passes)


def reference_means_of(run: InspectedRun, source: TrainingData, batch_size: int) -> ReferenceMeans:
    """Means over the first rows of a set."""
    if len(source) < MIN_REFERENCE_QUESTIONS:
        raise InputError(
            f"mean: {len(source)} questions, a mean is taken over {MIN_REFERENCE_QUESTIONS}; give a set that has as many, "
            "or leave mean out of --interventions"
        )
    places = np.arange(MIN_REFERENCE_QUESTIONS)
    return interventions.compute_reference_means(
        run,
        (load_batch(run, source, places[at : at + batch_size]) for at in range(0, MIN_REFERENCE_QUESTIONS, batch_size)),
    )


def accumulate(
    run: InspectedRun, batch: ReasoningBatch, rollout: LatentRollout, accumulator: InspectionAccumulator
) -> None:
    """Words, likeness and selection of one batch."""
    accumulator.top_ids += top_token_ids(rollout, run.logits)
    lengths = batch.chain_mask.sum(1).tolist()
    accumulator.chain_ids += [tuple(ids[:n].tolist()) for ids, n in zip(batch.chain_ids, lengths, strict=True)]
    if run.teacher_chain is None or not any(lengths):
        return
    left, held = run.teacher_chain(batch), latent_keys_values(run.decoder, rollout)
    M = rollout.latents.shape[1]
    for row, n in enumerate(lengths):
        if not n:
            continue
        for what, against, each in kv_similarity.iter_cosines(held, left, row, n):
            mean = each[list(left.matched_layers)].mean(0)
            found = (kv_similarity.diagonal_contrast(mean), kv_similarity.look_ahead_share(mean))
            accumulator.map_statistics.setdefault((what, against), []).append(found)
            if against == "kept" and n >= M:
                accumulator.mean_maps.setdefault((what, against), []).append(mean.double().cpu().numpy())
        kinds = kv_selection.classify_tokens(*kv_selection.decode_chain(batch, row, run.decode_token))
        accumulator.selections.append((kinds, kv_selection.chain_selections(left, row, n)))


def compute_chain_word_rates(accumulator: InspectionAccumulator, seed: int) -> NDArray[np.float64]:
    """How far thoughts name their chain, and that of another question that has one, [N, 3]."""
    made = np.full((len(accumulator.chain_ids), 3), np.nan)
    there = [i for i, chain in enumerate(accumulator.chain_ids) if chain]
    if len(there) < 2:
        return made
    for i, other in zip(there, interventions.choose_donors(len(there), seed).tolist(), strict=True):
        top, chain = accumulator.top_ids[i], accumulator.chain_ids[i]
        made[i] = (
            share_in_chain(top, chain),
            share_in_chain(top, accumulator.chain_ids[there[other]]),
            lcs_ratio(top, chain),
        )
    return made
