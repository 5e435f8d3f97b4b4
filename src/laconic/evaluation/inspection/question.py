"""One question looked into: words in the thoughts, likeness to a chain, what is kept of it, answers under edits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.batches import ReasoningBatch
from laconic.evaluation.inspection import dataset as inspection_dataset
from laconic.evaluation.inspection import interventions, kv_selection, kv_similarity
from laconic.evaluation.inspection.interventions import InterventionInputs, InterventionSpec
from laconic.evaluation.inspection.kv_selection import ChainSelection
from laconic.evaluation.inspection.kv_similarity import MapRows, SimilarityMap, to_rows
from laconic.evaluation.inspection.logit_lens import LogitLens, apply_logit_lens
from laconic.evaluation.inspection.subject import InspectedRun, TeacherChain, latent_keys_values
from laconic.interfaces import TrainingData
from laconic.latent.rollout import LatentRollout

MAX_DONOR_TRIES = 8  # other questions, of which one with another answer is the donor


class ChangedAnswer(NamedTuple):
    """The answer under an intervention; of a swap, what the donor's question is answered with."""

    spec: InterventionSpec
    answer: str
    donor_answer: str | None = None


class SelectionScores(NamedTuple):
    """Importance, redundancy, and the score that the run's selector goes by: a row for each layer and head matched."""

    I: MapRows
    R: MapRows
    S: MapRows


@dataclass(frozen=True)
class QuestionInspection:
    """A run on one question. Without a teacher or a chain there are no maps, selections and scores.

    `own` is the run's selector and `matched` its layers, if it was `taught` by what is kept; else those it is shown by;
    `stands` says what is kept for each slot. `alone` are effects on single slots.
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
    slot_effects: tuple[ChangedAnswer, ...] = ()

    @property
    def selection(self) -> ChainSelection | None:
        """What the run's own selector keeps."""
        return next((each for each in self.selections if each.name == self.policy), None)

    def find_map(self, space: str, baseline: str) -> SimilarityMap | None:
        """The map of keys or values against the chain, or against what is kept of it."""
        return next((map for map in self.maps if (map.space, map.baseline) == (space, baseline)), None)


@torch.no_grad()
def inspect_question(
    run: InspectedRun,
    batch: ReasoningBatch,
    specs: Sequence[InterventionSpec],
    others: TrainingData | None = None,
    *,
    top: int = 5,
    seed: int = 0,
) -> QuestionInspection:
    """A run on the one question of `asked`, beside the chain in it; `others` are questions for `mean` and `swap`."""
    batch = batch.to(run.device)
    own = run.think(batch, trace=True)
    answer = inspection_dataset.answer_after_rollout(run, batch, own).texts[0]
    words = apply_logit_lens(own, batch, run.logits, run.decode_token, top)
    found = QuestionInspection(run.name, run.method, run.num_iterations, answer, words)
    n = int(batch.chain_mask.sum())
    if run.teacher_chain is not None and n:
        found = with_chain(found, run, batch, own, run.teacher_chain(batch), n)
    return with_interventions(found, run, batch, own, specs, others, seed)


def with_chain(
    inspection: QuestionInspection,
    run: InspectedRun,
    batch: ReasoningBatch,
    rollout: LatentRollout,
    teacher: TeacherChain,
    n: int,
) -> QuestionInspection:
    """The same with all that a chain of `n` tokens is asked for."""
    words, steps = kv_selection.decode_chain(batch, 0, run.decode_token)
    I, R, S = (
        to_rows(torch.cat([each[l][0, :, :n] for l in teacher.matched_layers]).float())
        for each in (teacher.I, teacher.R, teacher.choices[teacher.policy].S)
    )
    return replace(
        inspection,
        maps=kv_similarity.similarity_maps(latent_keys_values(run.decoder, rollout), teacher, 0, n),
        selections=kv_selection.chain_selections(teacher, 0, n),
        token_classes=kv_selection.classify_tokens(words, steps),
        scores=SelectionScores(I, R, S),
        policy=teacher.policy,
        matched_layers=teacher.matched_layers,
        is_distilled=teacher.is_distilled,
        best_tokens=kv_selection.best_token_per_slot(teacher, words),
    )


def with_interventions(
    inspection: QuestionInspection,
    run: InspectedRun,
    batch: ReasoningBatch,
    rollout: LatentRollout,
    specs: Sequence[InterventionSpec],
    others: TrainingData | None,
    seed: int,
) -> QuestionInspection:
    """The same with the answers under each intervention, and where that is `zero` or `swap`, of each slot alone."""
    means = (
        inspection_dataset.reference_means_of(run, others, 64)
        if others is not None and len(others) >= inspection_dataset.MIN_REFERENCE_QUESTIONS
        else None
    )
    donor, theirs = find_donor(inspection, run, others)
    given = InterventionInputs(rollout, np.zeros(1, dtype=np.int64), seed, donor, means)
    M = rollout.latents.shape[1]

    def effect(intervention: InterventionSpec) -> ChangedAnswer:
        changed = inspection_dataset.answer_after_rollout(
            run, batch, interventions.run_intervention(run, batch, intervention, given)
        ).texts[0]
        return ChangedAnswer(intervention, changed, theirs if intervention.kind == "swap" else None)

    there = {"zero": True, "noise": True, "shuffle": M > 1, "mean": means is not None, "swap": donor is not None}
    wanted = [each for each in specs if there[each.kind]]
    where = "vectors" if any(each.target == "vectors" for each in wanted) else "cache"
    whole = [each for each in wanted if each.kind in ("zero", "swap") and each.target == where]
    single = [each._replace(slots=(m,)) for each in whole for m in interventions.resolve_slots(each, M)]
    return replace(inspection, effects=tuple(map(effect, wanted)), slot_effects=tuple(map(effect, single)))


def find_donor(
    inspection: QuestionInspection, run: InspectedRun, others: TrainingData | None
) -> tuple[LatentRollout | None, str | None]:
    """Thoughts on another question, and the answer that they give: the first of a few that is another answer."""
    for row in range(min(MAX_DONOR_TRIES, len(others)) if others is not None else 0):
        asked: Any = inspection_dataset.load_batch(run, others, np.array([row])) if others is not None else None
        rolled = run.think(asked, trace=True)
        answer = inspection_dataset.answer_after_rollout(run, asked, rolled).texts[0]
        if answer != inspection.answer:
            return rolled, answer
    return None, None
