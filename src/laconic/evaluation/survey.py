"""A run looked into over a set of questions: answers with and without edits, words in thoughts, likeness, selection."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from laconic.core.contract import Answers, Example, Reasoning, Source
from laconic.core.errors import BadInput
from laconic.core.rollout import Rollout
from laconic.evaluation import edits, selected, similarity
from laconic.evaluation.edits import Given, Intervention, Means
from laconic.evaluation.evaluate import judged
from laconic.evaluation.inspect import common, spoken, top_ids
from laconic.evaluation.protocols import Protocol
from laconic.evaluation.selected import Habit, Selection
from laconic.evaluation.statistics import Scores
from laconic.evaluation.subject import Subject, slots

REFERENCE = 256  # questions that a mean is taken over, at least
Show = Callable[[str, int, int], None]
Key = tuple[str, str]  # what is compared, against what


@dataclass
class Answered:
    """What was predicted for each question, and whether it was right."""

    predictions: list[str | None] = field(default_factory=list[str | None])
    hits: list[bool] = field(default_factory=list[bool])

    def add(self, answers: Answers, examples: Sequence[Example], protocol: Protocol) -> None:
        """The answers to the next questions."""
        for row in judged(answers, examples, protocol):
            self.predictions.append(row.prediction)
            self.hits.append(row.right)

    @property
    def right(self) -> Scores:
        """1 for each right answer, [N]."""
        return np.array(self.hits, dtype=np.float64)


@dataclass
class Survey:
    """A run over a set. `reads` has a row (share of slots whose word the chain holds, the same for the chain of
    another question, longest common subsequence) for each question, NaN where it has no chain or no other question has;
    `figures` (contrast, look-ahead) of each map for each chain; `near` the mean map of slots and kept tokens, of chains
    that fill all slots.
    """

    name: str
    method: str
    plain: Answered
    edited: dict[Intervention, Answered]
    swept: dict[int, Answered]
    donors: NDArray[np.int64] | None
    trained: int | None
    reads: NDArray[np.float64]
    figures: Mapping[Key, NDArray[np.float64]]
    near: Mapping[Key, NDArray[np.float64]]
    habits: tuple[Habit, ...]
    whole: int = 0  # chains that were kept whole
    filled: int = 0  # chains that `near` is a mean of

    def became(self, intervention: Intervention, protocol: Protocol) -> NDArray[np.float64]:
        """Whether an edited answer is the one that the donor's question got, where that was another one."""
        if self.donors is None:
            return np.zeros(0)
        found: list[bool] = []
        plain, changed = self.plain.predictions, self.edited[intervention].predictions
        for mine, new, i in zip(plain, changed, self.donors.tolist(), strict=True):
            theirs = plain[i]
            if theirs is not None and not (mine is not None and protocol.right(mine, theirs)):
                found.append(new is not None and protocol.right(new, theirs))
        return np.array(found, dtype=np.float64)


@dataclass
class Collected:
    """What is gathered question by question."""

    tops: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    chains: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    figures: dict[Key, list[tuple[float, float]]] = field(default_factory=dict[Key, list[tuple[float, float]]])
    near: dict[Key, list[NDArray[np.float64]]] = field(default_factory=dict[Key, list[NDArray[np.float64]]])
    chosen: list[tuple[tuple[str, ...], tuple[Selection, ...]]] = field(
        default_factory=list[tuple[tuple[str, ...], tuple[Selection, ...]]]
    )


@torch.no_grad()
def survey(
    subject: Subject,
    source: Source,
    examples: Sequence[Example],
    protocol: Protocol,
    interventions: Sequence[Intervention],
    *,
    rounds: Sequence[int] = (),
    seed: int = 0,
    batch: int = 64,
    show: Show | None = None,
) -> Survey:
    """Asks every question plainly, under each intervention, and in other numbers of rounds.

    Row i of `source` is question i of `examples`; means are over its first rows, `REFERENCE` of them.
    Raises `BadInput` (66) where it has fewer, `Usage` (2) for an edit that has nothing to go by.
    """
    kinds = {intervention.kind for intervention in interventions}
    order = edits.donors(len(examples), seed) if "swap" in kinds else None
    means = mean_of(subject, source, batch) if "mean" in kinds else None
    plain, collected = Answered(), Collected()
    changed = {intervention: Answered() for intervention in interventions}
    swept = {n: Answered() for n in rounds}
    for at in range(0, len(examples), batch):
        places = np.arange(at, min(at + batch, len(examples)))
        asked, some = rows(subject, source, places), [examples[i] for i in places.tolist()]
        own = subject.think(asked, trace=True)
        plain.add(follow(subject, asked, own), some, protocol)
        theirs = subject.think(rows(subject, source, order[places]), trace=True) if order is not None else None
        given = Given(own, places, seed, theirs, means)
        for intervention, answered in changed.items():
            answered.add(follow(subject, asked, edits.edited(subject, asked, intervention, given)), some, protocol)
        for n, answered in swept.items():
            answered.add(follow(subject, asked, subject.think(asked, rounds=n)), some, protocol)
        collect(subject, asked, own, collected)
        if show:
            show(subject.name, int(places[-1]) + 1, len(examples))
    return surveyed(subject, plain, changed, swept, order, collected, seed)


def surveyed(
    subject: Subject,
    plain: Answered,
    changed: dict[Intervention, Answered],
    swept: dict[int, Answered],
    donors: NDArray[np.int64] | None,
    found: Collected,
    seed: int,
) -> Survey:
    """What was gathered, question by question or as means."""
    return Survey(
        subject.name, subject.method, plain, changed, swept, donors, subject.rounds,
        reads=words_in(found, seed),
        figures={key: np.array(each) for key, each in found.figures.items()},
        near={key: np.mean(each, axis=0) for key, each in found.near.items()},
        habits=selected.habits(found.chosen),
        whole=sum(bool(each[0].held.all()) for _, each in found.chosen),
        filled=max((len(each) for each in found.near.values()), default=0),
    )  # fmt: skip


def rows(subject: Subject, source: Source, places: NDArray[np.int64]) -> Any:
    """Some rows of a set, where the run is."""
    return source.batch([int(i) for i in places], 0, 0).to(subject.device)


def follow(subject: Subject, asked: Reasoning, rolled: Rollout) -> Answers:
    """The answers after thoughts."""
    return subject.follow(asked, rolled.state, rolled.passes)


def mean_of(subject: Subject, source: Source, batch: int) -> Means:
    """Means over the first rows of a set."""
    if len(source) < REFERENCE:
        raise BadInput(
            f"mean: {len(source)} questions, a mean is taken over {REFERENCE}; give a set that has as many, "
            "or leave mean out of --edits"
        )
    places = np.arange(REFERENCE)
    return edits.means(subject, (rows(subject, source, places[at : at + batch]) for at in range(0, REFERENCE, batch)))


def collect(subject: Subject, asked: Reasoning, own: Rollout, into: Collected) -> None:
    """Words, likeness and selection of one batch."""
    into.tops += top_ids(own, subject.logits)
    lengths = asked.chain_live.sum(1).tolist()
    into.chains += [tuple(ids[:n].tolist()) for ids, n in zip(asked.chain, lengths, strict=True)]
    if subject.left is None or not any(lengths):
        return
    left, held = subject.left(asked), slots(subject.decoder, own)
    M = own.thoughts.shape[1]
    for row, n in enumerate(lengths):
        if not n:
            continue
        for what, against, each in similarity.cosines(held, left, row, n):
            mean = each[list(left.matched)].mean(0)
            found = (similarity.contrast(mean), similarity.ahead(mean))
            into.figures.setdefault((what, against), []).append(found)
            if against == "kept" and n >= M:
                into.near.setdefault((what, against), []).append(mean.double().cpu().numpy())
        kinds = selected.token_classes(*selected.chain_words(asked, row, subject.words))
        into.chosen.append((kinds, selected.selections(left, row, n)))


def words_in(found: Collected, seed: int) -> NDArray[np.float64]:
    """How far thoughts name their chain, and that of another question that has one, [N, 3]."""
    made = np.full((len(found.chains), 3), np.nan)
    there = [i for i, chain in enumerate(found.chains) if chain]
    if len(there) < 2:
        return made
    for i, other in zip(there, edits.donors(len(there), seed).tolist(), strict=True):
        top, chain = found.tops[i], found.chains[i]
        made[i] = spoken(top, chain), spoken(top, found.chains[there[other]]), common(top, chain)
    return made
