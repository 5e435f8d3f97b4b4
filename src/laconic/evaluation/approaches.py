"""Ways to learn classes without tuning weights: a state that is carried, text in the context, means of hidden states.

The nearest class mean is Rebuffi et al. 2017's (arXiv:1611.07725) classifier on a frozen model; with one covariance for
all classes it is that of linear discriminant analysis (Hayes and Kanan 2020, arXiv:1909.01520).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from laconic.core import finite
from laconic.core import state as values
from laconic.core.contract import Learner
from laconic.core.state import Layer, State
from laconic.core.tasks import Ids, Item, Tasks
from laconic.evaluation.classes import Scored, said_after
from laconic.evaluation.labels import PROMPTS, blind, device_of, forked, grid, read, runs

SHRINKAGE = 0.1  # of the shared covariance towards its mean variance


class Frozen:
    """The model as it is."""

    def __init__(self, model: Learner, tasks: Tasks) -> None:
        self.model, self.tasks = model, tasks

    def learn(self, items: Sequence[Item]) -> None:
        """Nothing."""

    def scored(self, items: Sequence[Item], seen: Sequence[int] | None = None) -> Scored:
        """What the model says of itself."""
        return said_after(self.model, self.tasks, self.model.start(1), items, seen)


class InContext:
    """The stream as text before each question, the oldest lines dropped where positions end."""

    def __init__(self, model: Learner, tasks: Tasks, positions: int) -> None:
        self.model, self.tasks = model, tasks
        longest = max(len(item.ids) for task in tasks.test for item in task) + max(map(len, tasks.words))
        self.room = positions - longest - len(tasks.first)
        self.lines: list[Ids] = []

    def learn(self, items: Sequence[Item]) -> None:
        """The newest lines that there is room for."""
        self.lines += [self.tasks.line(item) for item in items]
        kept, held = 0, 0
        while kept < len(self.lines) and held + len(self.lines[-1 - kept]) <= self.room:
            held += len(self.lines[-1 - kept])
            kept += 1
        self.lines = self.lines[len(self.lines) - kept :]

    def scored(self, items: Sequence[Item], seen: Sequence[int] | None = None) -> Scored:
        """What the model says with the lines before it."""
        text = tuple(i for line in self.lines for i in line)
        return said_after(self.model, self.tasks, self.model.start(1), items, seen, text)


class Carried:
    """A model that learns while it reads: the stream goes into its state, the weights stay as they are.

    Each line is read from a start without context, as the questions are, so that what is known of a class is in fast
    weights alone. With `predicted` "label" only the label and the line end teach, and what levels learn of the task
    reaches back to the utterance, as in tuning; levels with an error of their own then learn where the label is read.
    With "line" all of it teaches.
    """

    def __init__(self, model: Learner, tasks: Tasks, predicted: str = "line") -> None:
        self.model, self.tasks, self.predicted = model, tasks, predicted
        self.state: State = model.start(1)

    def learn(self, items: Sequence[Item]) -> None:
        """A task, line after line."""
        with torch.no_grad():
            for item in items:
                self.state = self.all_read(item) if blind(self.state) else self.apart(item)

    def all_read(self, item: Item) -> State:
        """A line of a model that has no context but its state."""
        return self.advance(self.tasks.first + self.tasks.line(item), self.state, taught=self.taught(item))

    def apart(self, item: Item) -> State:
        """A line read on an empty cache, which is emptied again behind it."""
        state, taught, (before, after) = self.state, self.taught(item), self.parts(item)
        if before:
            state = self.advance(before, state, learn=False)
        state = self.advance(after, state, taught=None if taught is None else taught[: len(after)])
        # The line end is the last word's target, and closes what is open, before the context goes.
        return uncached(self.advance(self.tasks.last, state, learn=False))

    def advance(self, ids: Ids, state: State, *, learn: bool = True, taught: Sequence[bool] | None = None) -> State:
        """Ids of one row."""
        device = device_of(self.model)
        row, asked = torch.tensor([ids], device=device), None
        if taught is not None:
            asked = torch.tensor([taught], device=device)
        return cast(State, cast(Any, finite.read(self.model, row, state, learn=learn, taught=asked).state))

    def taught(self, item: Item) -> list[bool] | None:
        """Which ids of a line teach; None where all do, and where no level learns of ids."""
        if self.predicted != "label" or self.state.open is None:
            return None
        read = self.tasks.first + item.ids
        return [False] * len(read) + [True] * (len(self.tasks.line(item)) - len(item.ids))

    def parts(self, item: Item) -> tuple[Ids, Ids]:
        """What of a line is only read, and what is learned of; of its end nothing."""
        read, told = self.tasks.first + item.ids, self.tasks.words[item.label]
        own = self.predicted == "label" and self.state.open is None
        return (read[:-1], read[-1:] + told) if own else ((), read + told)

    def scored(self, items: Sequence[Item], seen: Sequence[int] | None = None) -> Scored:
        """What the state says; every item is read on a fork."""
        return said_after(self.model, self.tasks, self.state, items, seen)

    @property
    def notes(self) -> dict[str, Any]:
        """How often each level has been updated, those that were as often being one, and the bytes of the state."""
        counts = {int(x.max()) for name, x in values.named(self.state.layers) if name.endswith(".updates")}
        return {"updates": sorted(counts, reverse=True), "state_bytes": values.bytes(self.state)}


def uncached(state: State) -> State:
    """The state with nothing in its caches, whose slots are gone, and its positions from 0 on."""
    layers = tuple(emptied(layer) for layer in state.layers)
    if all(layer.cache is None for layer in layers):
        return state
    opened = state.open and replace(state.open, layers=tuple(emptied(layer) for layer in state.open.layers))
    return State(layers, torch.zeros_like(state.position), opened)


def emptied(layer: Layer) -> Layer:
    """A layer without the slots of its cache."""
    return layer if layer.cache is None else replace(layer, cache=layer.cache.crop(0))


class NearestMean:
    """The class whose mean hidden state at the end of the utterance is nearest to the item's, the model frozen.

    `shared`: nearest by the covariance within classes, the same for all, a share of it made equal in every direction.
    """

    def __init__(self, model: Learner, tasks: Tasks, *, shared: bool = False) -> None:
        self.model, self.tasks, self.shared = model, tasks, shared
        self.sums: dict[int, np.ndarray] = {}
        self.counts: dict[int, int] = {}
        self.scatter: np.ndarray | float = 0.0

    def learn(self, items: Sequence[Item]) -> None:
        """Means and scatter, one example after another (Welford)."""
        for x, item in zip(ends(self.model, self.tasks, items), items, strict=True):
            n, total = self.counts.get(item.label, 0), self.sums.setdefault(item.label, np.zeros_like(x))
            if n:
                apart = x - total / n
                self.scatter = self.scatter + np.outer(apart, apart) * n / (n + 1)
            self.counts[item.label], self.sums[item.label] = n + 1, total + x

    def scored(self, items: Sequence[Item], seen: Sequence[int] | None = None) -> Scored:
        """Minus the squared distance; of a class that was never met, minus infinity."""
        X = ends(self.model, self.tasks, items)
        means = {label: total / self.counts[label] for label, total in self.sums.items()}
        scores = np.full((len(X), len(self.tasks.words)), -np.inf)
        inverse = np.linalg.inv(self.covariance(X.shape[1])) if self.shared else np.eye(X.shape[1])
        for label, mean in means.items():
            apart = X - mean
            scores[:, label] = -np.einsum("nd,de,ne->n", apart, inverse, apart)
        return Scored(scores)

    def covariance(self, D: int) -> np.ndarray:
        """Within classes, shrunk."""
        S = self.scatter / max(1, sum(self.counts.values()) - len(self.counts)) + np.zeros((D, D))
        return (1 - SHRINKAGE) * S + (SHRINKAGE * np.trace(S) / D + 1e-12) * np.eye(D)


def ends(model: Learner, tasks: Tasks, items: Sequence[Item]) -> np.ndarray:
    """[N, D] float64: the hidden state at the last token of every utterance, each read by itself."""
    found: dict[int, np.ndarray] = {}
    with torch.no_grad():
        for at in runs(sorted(range(len(items)), key=lambda i: len(items[i].ids)), PROMPTS):
            ids, live = grid([tasks.first + items[i].ids for i in at], device_of(model))
            seen = read(model, ids, forked(model.start(1), len(at)), live)
            last = seen.hidden[torch.arange(len(at)), live.sum(1) - 1].double().cpu().numpy()
            found |= dict(zip(at, last, strict=True))
    return np.stack([found[i] for i in range(len(items))])
