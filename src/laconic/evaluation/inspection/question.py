"""Inspect one question: logit lens, similarity to a chain, what is selected of it, answers under interventions."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from laconic.batches import ReasoningBatch
from laconic.evaluation.inspection import dataset as inspection_dataset
from laconic.evaluation.inspection import interventions, kv_selection, kv_similarity
from laconic.evaluation.inspection.inspected_run import InspectedRun, TeacherChain, latent_keys_values
from laconic.evaluation.inspection.interventions import InterventionInputs, InterventionSpec
from laconic.evaluation.inspection.kv_selection import ChainSelection
from laconic.evaluation.inspection.kv_similarity import MapRows, SimilarityMap, to_rows
from laconic.evaluation.inspection.logit_lens import LogitLens, apply_logit_lens
from laconic.evaluation.results_store import ProgressCallback
from laconic.interfaces import TrainingData
from laconic.latent.rollout import LatentRollout

MAX_DONOR_TRIES = 8
NUM_MEAN_QUESTIONS = 16  # for "mean"; a page on one question must not read hundreds of others


class PartCounter:
    """Reports the parts of an inspection as they begin, for a progress bar; a total of 0 is unknown."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self.callback, self.total, self.num_begun = callback, 0, 0

    def begin(self, name: str) -> None:
        if self.callback is not None:
            self.callback(name, self.num_begun, self.total)
        self.num_begun += 1


class ChangedAnswer(NamedTuple):
    """The answer under an intervention; for "swap" also the answer to the donor's question."""

    spec: InterventionSpec
    answer: str
    donor_answer: str | None = None


class SelectionScores(NamedTuple):
    """Importance, redundancy and the score of the run's policy: a row for each matched layer and head."""

    I: MapRows
    R: MapRows
    S: MapRows


@dataclass(frozen=True)
class QuestionInspection:
    """A run on one question. Without a teacher or a chain there are no maps, selections and scores.

    `num_iterations` is that of training, None for sequential latents. The scores are those of the run's own policy;
    matched layers are distilled, or would be; `best_tokens` are the chain tokens that most heads assign to each latent.
    """

    name: str
    method: str
    num_iterations: int | None
    answer: str
    lens: LogitLens
    maps: tuple[SimilarityMap, ...] = ()
    selections: tuple[ChainSelection, ...] = ()
    token_classes: tuple[str, ...] = ()
    scores: SelectionScores | None = None
    policy: str = ""
    matched_layers: tuple[int, ...] = ()
    is_distilled: bool = False
    best_tokens: tuple[tuple[str, float], ...] = ()
    effects: tuple[ChangedAnswer, ...] = ()

    def find_map(self, space: str, baseline: str) -> SimilarityMap | None:
        """Return the map of a space against the chain or against its selected tokens."""
        return next((map for map in self.maps if (map.space, map.baseline) == (space, baseline)), None)


@torch.no_grad()
def inspect_question(
    run: InspectedRun,
    batch: ReasoningBatch,
    others: TrainingData | None = None,
    *,
    top: int = 5,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> QuestionInspection:
    """Inspect a run on one question with its chain; without other questions, "mean" and "swap" are left out.

    `progress` is called as each part begins, with its name, the number of finished parts, and their total.
    """
    batch, parts = batch.to(run.device), PartCounter(progress)
    parts.begin("thinking and answering")
    rollout = run.think(batch, record_passes=True)
    parts.total = 4 + len(interventions.list_interventions(rollout.latents.shape[1]))
    answer = run.answer(batch, rollout).texts[0]
    lens = apply_logit_lens(rollout, batch, run.decoder.logits, run.decode_token, top)
    inspection = QuestionInspection(run.name, run.method, run.num_iterations, answer, lens)
    n = int(batch.chain_mask.sum())
    if run.teacher_chain is not None and n:
        parts.begin("comparing the latents with the chain")
        inspection = with_chain(inspection, run, batch, rollout, run.teacher_chain(batch), n)
    return with_interventions(inspection, run, batch, rollout, others, seed, parts)


def with_chain(
    inspection: QuestionInspection,
    run: InspectedRun,
    batch: ReasoningBatch,
    rollout: LatentRollout,
    teacher: TeacherChain,
    n: int,
) -> QuestionInspection:
    """Add the comparison with a chain of `n` tokens."""
    tokens, steps = kv_selection.decode_chain(batch, run.decode_token)
    I, R, S = (
        to_rows(torch.cat([scores[l][0, :, :n] for l in teacher.matched_layers]).float())
        for scores in (teacher.I, teacher.R, teacher.choices[teacher.policy].S)
    )
    return replace(
        inspection,
        maps=kv_similarity.similarity_maps(latent_keys_values(run.decoder, rollout), teacher, n),
        selections=kv_selection.chain_selections(teacher, n),
        token_classes=kv_selection.classify_tokens(tokens, steps),
        scores=SelectionScores(I, R, S),
        policy=teacher.policy,
        matched_layers=teacher.matched_layers,
        is_distilled=teacher.is_distilled,
        best_tokens=kv_selection.best_token_per_slot(teacher, tokens),
    )


def with_interventions(
    inspection: QuestionInspection,
    run: InspectedRun,
    batch: ReasoningBatch,
    rollout: LatentRollout,
    others: TrainingData | None,
    seed: int,
    parts: PartCounter,
) -> QuestionInspection:
    """Add the answers under each intervention that is possible."""
    means, donor_rollout, donor_answer = None, None, None
    if others is not None:
        num_questions = min(NUM_MEAN_QUESTIONS, len(others))
        parts.begin(f"thinking about {num_questions} other questions for mean")
        rows = [inspection_dataset.load_batch(run, others, np.arange(num_questions))]
        means = interventions.compute_reference_means(run, rows)
        parts.begin("finding a question to swap with")
        donor_rollout, donor_answer = find_donor(inspection, run, others)
    inputs = InterventionInputs(rollout, np.zeros(1, dtype=np.int64), seed, donor_rollout, means)
    has_inputs = {"mean": means is not None, "swap": donor_rollout is not None}
    effects: list[ChangedAnswer] = []
    for spec in interventions.list_interventions(rollout.latents.shape[1]):
        if has_inputs.get(spec.kind, True):
            parts.begin(f"{spec.kind} in {spec.target}")
            answer = run.answer(batch, interventions.run_intervention(run, batch, spec, inputs)).texts[0]
            effects.append(ChangedAnswer(spec, answer, donor_answer if spec.kind == "swap" else None))
    return replace(inspection, effects=tuple(effects))


def find_donor(
    inspection: QuestionInspection, run: InspectedRun, others: TrainingData
) -> tuple[LatentRollout | None, str | None]:
    """Return the latents of another question and their answer: of the first few, one with a different answer."""
    for row in range(min(MAX_DONOR_TRIES, len(others))):
        batch = inspection_dataset.load_batch(run, others, np.array([row]))
        rollout = run.think(batch, record_passes=True)
        answer = run.answer(batch, rollout).texts[0]
        if answer != inspection.answer:
            return rollout, answer
    return None, None
