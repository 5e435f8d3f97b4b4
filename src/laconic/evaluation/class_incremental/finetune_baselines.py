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

from laconic import rng
from laconic.batches import IGNORE_INDEX
from laconic.evaluation.class_incremental.label_scoring import get_device, get_module, pad_right, read_ids
from laconic.evaluation.class_incremental.protocol import ClassScores, score_after
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream, LabelledUtterance
from laconic.interfaces import StatefulLM

REPLAY_KEY, LABEL_KEY, BATCH_KEY = 1, 2, 100  # what draws are made for; batches from 100 on, a number a step


@dataclass(frozen=True)
class FinetuneConfig:
    """How baselines are tuned: AdamW's rate, lines a step, and what of a line is predicted: its label, or all of it.

    `weight` is that of EWC's penalty, `sampled` the examples of a class its Fisher information is taken of; `kept` the
    examples of a class in the reservoir, of which half of a batch is then drawn.
    """

    learning_rate: float = 1e-3
    batch_size: int = 8
    loss_on: Literal["label", "line"] = "label"
    ewc_weight: float = 100.0
    fisher_per_class: int = 5
    replay_per_class: int = 5
    max_grad_norm: float = 1.0


@dataclass
class EWCPenalty:
    """EWC's memory: F summed over the tasks so far, and theta*."""

    fisher: list[Tensor] = field(default_factory=list)
    theta_star: list[Tensor] = field(default_factory=list)

    def compute(self, parameters: Sequence[Tensor]) -> Tensor | float:
        """½ sum of F (theta - theta*)²; 0 before the first task."""
        pairs = zip(self.fisher, parameters, self.theta_star, strict=True) if self.fisher else ()
        return sum(((F_ * (p - s).square()).sum() / 2 for F_, p, s in pairs), 0.0)


@dataclass
class ReplayReservoir:
    """At most `size` examples of every class, each that came as likely as any other of its class."""

    size: int
    seed: int
    examples: dict[int, list[LabelledUtterance]] = field(default_factory=dict)
    num_seen: dict[int, int] = field(default_factory=dict)

    def add(self, item: LabelledUtterance) -> None:
        """One more example."""
        own, count = self.examples.setdefault(item.label, []), self.num_seen.get(item.label, 0)
        self.num_seen[item.label] = count + 1
        if len(own) < self.size:
            own.append(item)
            return
        place = int(rng.uniform(self.seed, REPLAY_KEY, item.label, count) * (count + 1))
        if place < self.size:
            own[place] = item

    def sample(self, n: int, step: int) -> list[LabelledUtterance]:
        """At most `n` different examples of all that are held."""
        every = [item for label in sorted(self.examples) for item in self.examples[label]]
        if not every:
            return []
        order = rng.permuted_index(self.seed, BATCH_KEY + step, np.arange(min(n, len(every))), len(every))
        return [every[i] for i in order.tolist()]


class FinetunedLearner:
    """A copy of a model whose weights are tuned on every task in turn; what it was is not changed.

    With an `anchor` it is EWC, with a `reservoir` replay, with neither fine-tuning.
    """

    def __init__(
        self,
        model: StatefulLM,
        stream: ClassIncrementalStream,
        config: FinetuneConfig,
        ewc: EWCPenalty | None = None,
        replay: ReplayReservoir | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.module = get_module(self.model).train()
        self.stream, self.config, self.ewc, self.replay = stream, config, ewc, replay
        self.parameters = [p.requires_grad_() for p in self.module.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.num_updates, self.seen_classes = 0, set[int]()

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        """A task: every example once, in order."""
        old = 0 if self.replay is None or not self.replay.examples else self.config.batch_size // 2
        for batch in (
            items[i : i + self.config.batch_size - old] for i in range(0, len(items), self.config.batch_size - old)
        ):
            again = [] if self.replay is None or not old else self.replay.sample(old, self.num_updates)
            self.update([*batch, *again])
        if self.replay is not None:
            for item in items:
                self.replay.add(item)
        self.seen_classes |= {item.label for item in items}
        if self.ewc is not None:
            self.ewc.fisher = self.fisher_information(items)
            self.ewc.theta_star = [p.detach().clone() for p in self.parameters]

    def update(self, batch: Sequence[LabelledUtterance]) -> None:
        """One update."""
        self.optimizer.zero_grad()
        loss = compute_line_loss(self.model, self.stream, batch, self.config.loss_on)
        if self.ewc is not None:
            loss = loss + self.config.ewc_weight * self.ewc.compute(self.parameters)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        self.num_updates += 1

    def fisher_information(self, items: Sequence[LabelledUtterance]) -> list[Tensor]:
        """F with this task's added: the mean square of the gradient of log p, of a label drawn from the model itself.

        The label is drawn among the classes met so far, not read from the example: else it were no Fisher information.
        """
        assert self.ewc is not None
        chosen = first_per_class(items, self.config.fisher_per_class)
        classes = sorted(self.seen_classes)
        sums = [torch.zeros_like(p) for p in self.parameters]
        scores = self.score(chosen).scores[:, classes] * [len(self.stream.label_ids[k]) for k in classes]
        for n, item in enumerate(chosen):
            shares = np.exp(scores[n] - scores[n].max())
            draw = rng.uniform(self.stream.seed, LABEL_KEY, self.num_updates, n) * shares.sum()
            label = classes[min(int(np.searchsorted(shares.cumsum(), draw)), len(classes) - 1)]
            loss = compute_line_loss(self.model, self.stream, [LabelledUtterance(item.input_ids, label)], "label")
            told = len(self.stream.label_ids[label]) + len(self.stream.line_end_ids)
            found = torch.autograd.grad(loss * told, self.parameters, materialize_grads=True)
            sums = [s + g.square() for s, g in zip(sums, found, strict=True)]
        mean = [s / len(chosen) for s in sums]
        return [a + b for a, b in zip(self.ewc.fisher, mean, strict=True)] if self.ewc.fisher else mean

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int] | None = None) -> ClassScores:
        """What the weights say now; every item is read by itself."""
        self.module.eval()
        found = score_after(self.model, self.stream, self.model.initial_state(1), items, seen_classes)
        self.module.train()
        return found


def first_per_class(items: Sequence[LabelledUtterance], n: int) -> list[LabelledUtterance]:
    """The first `n` examples of every class."""
    met: dict[int, int] = {}
    chosen: list[LabelledUtterance] = []
    for item in items:
        met[item.label] = met.get(item.label, 0) + 1
        if met[item.label] <= n:
            chosen.append(item)
    return chosen


def compute_line_loss(
    model: StatefulLM, stream: ClassIncrementalStream, batch: Sequence[LabelledUtterance], loss_on: str
) -> Tensor:
    """Nats per predicted token: of the label's words and the end of the line, or of the whole line."""
    rows = [stream.start_ids + stream.training_ids(item) for item in batch]
    ids, live = pad_right(rows, get_device(model))
    targets = ids.roll(-1, 1).masked_fill(~live.roll(-1, 1), IGNORE_INDEX)
    targets[:, -1] = IGNORE_INDEX
    if loss_on == "label":
        for row, item in zip(targets, batch, strict=True):
            row[: len(stream.start_ids) + len(item.input_ids) - 1] = IGNORE_INDEX
    logits = model.logits(read_ids(model, ids, model.initial_state(len(ids)), live).hidden_states)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX)
