"""One question looked into: words in the thoughts, likeness to a chain, what is kept of it, answers under edits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.core.contract import Reasoning, Source
from laconic.core.rollout import Rollout
from laconic.evaluation import edits, selected, similarity, survey
from laconic.evaluation.edits import Given, Intervention
from laconic.evaluation.inspect import Inspection, inspect
from laconic.evaluation.selected import Selection
from laconic.evaluation.similarity import Map, Rows, plain
from laconic.evaluation.subject import Left, Subject, slots

TRIED = 8  # other questions, of which one with another answer is the donor


class Effect(NamedTuple):
    """The answer under an intervention; of a swap, what the donor's question is answered with."""

    intervention: Intervention
    answer: str
    donor: str | None = None


class Scores(NamedTuple):
    """Importance, redundancy, and the score that the run's selector goes by: a row for each layer and head matched."""

    I: Rows
    R: Rows
    S: Rows


@dataclass(frozen=True)
class Looked:
    """A run on one question. Without a teacher or a chain there are no maps, selections and scores.

    `own` is the run's selector and `matched` its layers, if it was `taught` by what is kept; else those it is shown by;
    `stands` says what is kept for each slot. `alone` are effects on single slots.
    """

    name: str
    method: str
    rounds: int | None
    answer: str
    words: Inspection
    maps: tuple[Map, ...] = ()
    selections: tuple[Selection, ...] = ()
    kinds: tuple[str, ...] = ()
    scores: Scores | None = None
    own: str = ""
    matched: tuple[int, ...] = ()
    taught: bool = False
    stands: tuple[tuple[str, float], ...] = ()
    effects: tuple[Effect, ...] = ()
    alone: tuple[Effect, ...] = ()

    @property
    def kept(self) -> Selection | None:
        """What the run's own selector keeps."""
        return next((each for each in self.selections if each.name == self.own), None)

    def map(self, what: str, against: str) -> Map | None:
        """The map of keys or values against the chain, or against what is kept of it."""
        return next((map for map in self.maps if (map.what, map.against) == (what, against)), None)


@torch.no_grad()
def look(
    subject: Subject,
    asked: Reasoning,
    interventions: Sequence[Intervention],
    others: Source | None = None,
    *,
    top: int = 5,
    seed: int = 0,
) -> Looked:
    """A run on the one question of `asked`, beside the chain in it; `others` are questions for `mean` and `swap`."""
    asked = asked.to(subject.device)
    own = subject.think(asked, trace=True)
    answer = survey.follow(subject, asked, own).texts[0]
    words = inspect(own, asked, subject.logits, subject.words, top)
    found = Looked(subject.name, subject.method, subject.rounds, answer, words)
    n = int(asked.chain_live.sum())
    if subject.left is not None and n:
        found = beside(found, subject, asked, own, subject.left(asked), n)
    return tried(found, subject, asked, own, interventions, others, seed)


def beside(found: Looked, subject: Subject, asked: Reasoning, own: Rollout, left: Left, n: int) -> Looked:
    """The same with all that a chain of `n` tokens is asked for."""
    words, steps = selected.chain_words(asked, 0, subject.words)
    I, R, S = (
        plain(torch.cat([each[l][0, :, :n] for l in left.matched]).float())
        for each in (left.I, left.R, left.chosen[left.own].S)
    )
    return replace(
        found,
        maps=similarity.maps(slots(subject.decoder, own), left, 0, n),
        selections=selected.selections(left, 0, n),
        kinds=selected.token_classes(words, steps),
        scores=Scores(I, R, S),
        own=left.own,
        matched=left.matched,
        taught=left.taught,
        stands=selected.stands(left, words),
    )


def tried(
    found: Looked,
    subject: Subject,
    asked: Reasoning,
    own: Rollout,
    interventions: Sequence[Intervention],
    others: Source | None,
    seed: int,
) -> Looked:
    """The same with the answers under each intervention, and where that is `zero` or `swap`, of each slot alone."""
    means = survey.mean_of(subject, others, 64) if others is not None and len(others) >= survey.REFERENCE else None
    donor, theirs = donor_of(found, subject, others)
    given = Given(own, np.zeros(1, dtype=np.int64), seed, donor, means)
    M = own.thoughts.shape[1]

    def effect(intervention: Intervention) -> Effect:
        changed = survey.follow(subject, asked, edits.edited(subject, asked, intervention, given)).texts[0]
        return Effect(intervention, changed, theirs if intervention.kind == "swap" else None)

    there = {"zero": True, "noise": True, "shuffle": M > 1, "mean": means is not None, "swap": donor is not None}
    wanted = [each for each in interventions if there[each.kind]]
    where = "vectors" if any(each.where == "vectors" for each in wanted) else "cache"
    whole = [each for each in wanted if each.kind in ("zero", "swap") and each.where == where]
    single = [each._replace(at=(m,)) for each in whole for m in edits.listed(each, M)]
    return replace(found, effects=tuple(map(effect, wanted)), alone=tuple(map(effect, single)))


def donor_of(found: Looked, subject: Subject, others: Source | None) -> tuple[Rollout | None, str | None]:
    """Thoughts on another question, and the answer that they give: the first of a few that is another answer."""
    for row in range(min(TRIED, len(others)) if others is not None else 0):
        asked: Any = survey.rows(subject, others, np.array([row])) if others is not None else None
        rolled = subject.think(asked, trace=True)
        answer = survey.follow(subject, asked, rolled).texts[0]
        if answer != found.answer:
            return rolled, answer
    return None, None
