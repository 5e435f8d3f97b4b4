"""Weights tuned on a stream: plainly, with old examples beside the new (replay), or held where they mattered (EWC).

EWC: Kirkpatrick et al. 2017 (arXiv:1612.00796), with one running Fisher as in Schwarz et al. 2018 (arXiv:1805.06370).
Replay: a reservoir of each class (Vitter 1985, doi:10.1145/3147.3165).

Symbols: F the diagonal of the Fisher information, theta the weights, theta* those after the last task.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core import keyed
from laconic.core.contract import UNSCORED, Learner
from laconic.core.tasks import Item, Tasks
from laconic.evaluation.classes import Scored, said_after
from laconic.evaluation.labels import device_of, grid, module_of, read

REPLAYED, SAMPLED, DRAWN = 1, 2, 100  # what draws are made for; batches from 100 on, a number a step


@dataclass(frozen=True)
class Tuning:
    """How baselines are tuned: AdamW's rate, lines a step, and what of a line is predicted: its label, or all of it.

    `weight` is that of EWC's penalty, `sampled` the examples of a class its Fisher information is taken of; `kept` the
    examples of a class in the reservoir, of which half of a batch is then drawn.
    """

    rate: float = 1e-3
    batch: int = 8
    predicted: Literal["label", "line"] = "label"
    weight: float = 100.0
    sampled: int = 5
    kept: int = 5
    clip: float = 1.0


@dataclass
class Anchor:
    """EWC's memory: F summed over the tasks so far, and theta*."""

    fisher: list[Tensor] = field(default_factory=list)
    star: list[Tensor] = field(default_factory=list)

    def penalty(self, parameters: Sequence[Tensor]) -> Tensor | float:
        """½ sum of F (theta - theta*)²; 0 before the first task."""
        pairs = zip(self.fisher, parameters, self.star, strict=True) if self.fisher else ()
        return sum(((F_ * (p - s).square()).sum() / 2 for F_, p, s in pairs), 0.0)


@dataclass
class Reservoir:
    """At most `size` examples of every class, each that came as likely as any other of its class."""

    size: int
    seed: int
    held: dict[int, list[Item]] = field(default_factory=dict)
    met: dict[int, int] = field(default_factory=dict)

    def add(self, item: Item) -> None:
        """One more example."""
        own, count = self.held.setdefault(item.label, []), self.met.get(item.label, 0)
        self.met[item.label] = count + 1
        if len(own) < self.size:
            own.append(item)
            return
        place = int(keyed.uniform(self.seed, REPLAYED, item.label, count) * (count + 1))
        if place < self.size:
            own[place] = item

    def draw(self, n: int, step: int) -> list[Item]:
        """At most `n` different examples of all that are held."""
        every = [item for label in sorted(self.held) for item in self.held[label]]
        if not every:
            return []
        order = keyed.index(self.seed, DRAWN + step, np.arange(min(n, len(every))), len(every))
        return [every[i] for i in order.tolist()]


class Tuned:
    """A copy of a model whose weights are tuned on every task in turn; what it was is not changed.

    With an `anchor` it is EWC, with a `reservoir` replay, with neither fine-tuning.
    """

    def __init__(
        self,
        model: Learner,
        tasks: Tasks,
        how: Tuning,
        anchor: Anchor | None = None,
        reservoir: Reservoir | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.module = module_of(self.model).train()
        self.tasks, self.how, self.anchor, self.reservoir = tasks, how, anchor, reservoir
        self.parameters = [p.requires_grad_() for p in self.module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=how.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.steps, self.seen = 0, set[int]()

    def learn(self, items: Sequence[Item]) -> None:
        """A task: every example once, in order."""
        old = 0 if self.reservoir is None or not self.reservoir.held else self.how.batch // 2
        for batch in (items[i : i + self.how.batch - old] for i in range(0, len(items), self.how.batch - old)):
            again = [] if self.reservoir is None or not old else self.reservoir.draw(old, self.steps)
            self.step([*batch, *again])
        if self.reservoir is not None:
            for item in items:
                self.reservoir.add(item)
        self.seen |= {item.label for item in items}
        if self.anchor is not None:
            self.anchor.fisher = self.information(items)
            self.anchor.star = [p.detach().clone() for p in self.parameters]

    def step(self, batch: Sequence[Item]) -> None:
        """One update."""
        self.optimizer.zero_grad()
        loss = line_loss(self.model, self.tasks, batch, self.how.predicted)
        if self.anchor is not None:
            loss = loss + self.how.weight * self.anchor.penalty(self.parameters)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.how.clip)
        self.optimizer.step()
        self.steps += 1

    def information(self, items: Sequence[Item]) -> list[Tensor]:
        """F with this task's added: the mean square of the gradient of log p, of a label drawn from the model itself.

        The label is drawn among the classes met so far, not read from the example: else it were no Fisher information.
        """
        assert self.anchor is not None
        chosen = few(items, self.how.sampled)
        classes = sorted(self.seen)
        sums = [torch.zeros_like(p) for p in self.parameters]
        scores = self.scored(chosen).scores[:, classes] * [len(self.tasks.words[k]) for k in classes]
        for n, item in enumerate(chosen):
            shares = np.exp(scores[n] - scores[n].max())
            draw = keyed.uniform(self.tasks.seed, SAMPLED, self.steps, n) * shares.sum()
            label = classes[min(int(np.searchsorted(shares.cumsum(), draw)), len(classes) - 1)]
            loss = line_loss(self.model, self.tasks, [Item(item.ids, label)], "label")
            told = len(self.tasks.words[label]) + len(self.tasks.last)
            found = torch.autograd.grad(loss * told, self.parameters, materialize_grads=True)
            sums = [s + g.square() for s, g in zip(sums, found, strict=True)]
        mean = [s / len(chosen) for s in sums]
        return [a + b for a, b in zip(self.anchor.fisher, mean, strict=True)] if self.anchor.fisher else mean

    def scored(self, items: Sequence[Item], seen: Sequence[int] | None = None) -> Scored:
        """What the weights say now; every item is read by itself."""
        self.module.eval()
        found = said_after(self.model, self.tasks, self.model.start(1), items, seen)
        self.module.train()
        return found


def few(items: Sequence[Item], n: int) -> list[Item]:
    """The first `n` examples of every class."""
    met: dict[int, int] = {}
    chosen: list[Item] = []
    for item in items:
        met[item.label] = met.get(item.label, 0) + 1
        if met[item.label] <= n:
            chosen.append(item)
    return chosen


def line_loss(model: Learner, tasks: Tasks, batch: Sequence[Item], predicted: str) -> Tensor:
    """Nats per predicted token: of the label's words and the end of the line, or of the whole line."""
    rows = [tasks.first + tasks.line(item) for item in batch]
    ids, live = grid(rows, device_of(model))
    targets = ids.roll(-1, 1).masked_fill(~live.roll(-1, 1), UNSCORED)
    targets[:, -1] = UNSCORED
    if predicted == "label":
        for row, item in zip(targets, batch, strict=True):
            row[: len(tasks.first) + len(item.ids) - 1] = UNSCORED
    logits = model.logits(read(model, ids, model.start(len(ids)), live).hidden)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=UNSCORED)
