"""Fine-tuning baselines of class-incremental learning: plain, of LoRA alone, with replay of old examples, with EWC.

LoRA: Hu et al. 2021 (arXiv:2106.09685). EWC: Kirkpatrick et al. 2017 (arXiv:1612.00796), with one running Fisher
information as in Schwarz et al. 2018 (arXiv:1805.06370). Replay: a reservoir per class (Vitter 1985,
doi:10.1145/3147.3165).

Symbols: F the diagonal of the Fisher information, theta the weights, theta* those after the last task.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from laconic import rng
from laconic.batches import IGNORE_INDEX
from laconic.batches.padding import pad_rows
from laconic.config.recipe import LoraConfig
from laconic.evaluation.class_incremental.label_scoring import ScoreArray, get_device, get_module, read_ids
from laconic.evaluation.class_incremental.protocol import score_after
from laconic.evaluation.class_incremental.tasks import ClassIncrementalStream, LabelledUtterance
from laconic.experiment.from_recipe.build_model import add_lora
from laconic.interfaces import StatefulLM
from laconic.losses import masked_cross_entropy

REPLAY_KEY, LABEL_KEY, BATCH_KEY = 1, 2, 100  # purposes of random numbers; BATCH_KEY + step for batches


@dataclass(frozen=True)
class FinetuneConfig:
    """How the baselines are fine-tuned, with AdamW; a batch has this many lines.

    `lora_rate_ratio` is the learning rate of LoRA relative to the others'. EWC estimates its Fisher information from
    `fisher_per_class` examples of a class. The reservoir of replay has `replay_per_class`, and half of each batch comes
    from it.
    """

    learning_rate: float = 1e-3
    lora_rate_ratio: float = 10.0
    lora_rank: int = 16
    batch_size: int = 8
    ewc_weight: float = 100.0
    fisher_per_class: int = 5
    replay_per_class: int = 5
    max_grad_norm: float = 1.0


@dataclass
class EWCPenalty:
    """Elastic weight consolidation: F summed over the tasks so far, and theta*."""

    fisher: list[Tensor] = field(default_factory=list)
    theta_star: list[Tensor] = field(default_factory=list)

    def compute(self, parameters: Sequence[Tensor]) -> Tensor | float:
        """Return ½ sum of F (theta - theta*)²; 0 before the first task."""
        terms = zip(self.fisher, parameters, self.theta_star, strict=True) if self.fisher else ()
        return sum(((F_ * (p - star).square()).sum() / 2 for F_, p, star in terms), 0.0)


@dataclass
class ReplayReservoir:
    """At most `size` examples of every class, a uniform sample of those seen."""

    size: int
    seed: int
    examples: dict[int, list[LabelledUtterance]] = field(default_factory=dict)
    num_seen: dict[int, int] = field(default_factory=dict)

    def add(self, item: LabelledUtterance) -> None:
        examples = self.examples.setdefault(item.label, [])
        count = self.num_seen.get(item.label, 0)
        self.num_seen[item.label] = count + 1
        if len(examples) < self.size:
            examples.append(item)
            return
        slot = int(rng.uniform(self.seed, REPLAY_KEY, item.label, count) * (count + 1))
        if slot < self.size:
            examples[slot] = item

    def sample(self, n: int, step: int) -> list[LabelledUtterance]:
        examples = [item for label in sorted(self.examples) for item in self.examples[label]]
        return [examples[i] for i in rng.permutation(len(examples), self.seed, BATCH_KEY + step, n)]


class FinetunedLearner:
    """Fine-tunes a copy of a model on every task in turn, with EWC's penalty or with replay if one is given.

    With `use_lora`, only an adapter on its linear layers is trained; levels of an MLP are not linear layers.
    """

    def __init__(
        self,
        model: StatefulLM,
        stream: ClassIncrementalStream,
        config: FinetuneConfig,
        ewc: EWCPenalty | None = None,
        replay: ReplayReservoir | None = None,
        use_lora: bool = False,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.module = get_module(self.model).train().requires_grad_()
        self.stream, self.config, self.ewc, self.replay = stream, config, ewc, replay
        learning_rate = config.learning_rate
        if use_lora:
            lora = LoraConfig(rank=config.lora_rank, alpha=2 * config.lora_rank, dropout=0.0)
            add_lora(self.module, lora, stream.seed)
            learning_rate *= config.lora_rate_ratio
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.num_updates = 0
        self.seen_classes = set[int]()

    def learn(self, items: Sequence[LabelledUtterance]) -> None:
        replay, num_new = self.replay, self.config.batch_size
        num_old = num_new // 2 if replay and replay.examples else 0
        num_new -= num_old
        for start in range(0, len(items), num_new):
            old = replay.sample(num_old, self.num_updates) if replay and num_old else []
            self.update([*items[start : start + num_new], *old])
        if replay:
            for item in items:
                replay.add(item)
        self.seen_classes |= {item.label for item in items}
        if self.ewc is not None:
            self.ewc.fisher = self.fisher_information(items)
            self.ewc.theta_star = [p.detach().clone() for p in self.parameters]

    def update(self, batch: Sequence[LabelledUtterance]) -> None:
        self.optimizer.zero_grad()
        loss = compute_label_loss(self.model, self.stream, batch)
        if self.ewc is not None:
            loss = loss + self.config.ewc_weight * self.ewc.compute(self.parameters)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        self.num_updates += 1

    def fisher_information(self, items: Sequence[LabelledUtterance]) -> list[Tensor]:
        """Return F with this task's added: the mean squared gradient of log p(label).

        The label is sampled from the model among the classes seen so far. With the label of the example it would be the
        empirical Fisher, which is not the Fisher information.
        """
        assert self.ewc is not None
        sampled = first_per_class(items, self.config.fisher_per_class)
        classes = sorted(self.seen_classes)
        sums = [torch.zeros_like(p) for p in self.parameters]
        log_probs = self.score(sampled)[:, classes] * [len(self.stream.label_ids[k]) for k in classes]
        for n, item in enumerate(sampled):
            weights = np.exp(log_probs[n] - log_probs[n].max())
            draw = rng.uniform(self.stream.seed, LABEL_KEY, self.num_updates, n) * weights.sum()
            label = classes[min(int(np.searchsorted(weights.cumsum(), draw)), len(classes) - 1)]
            loss = compute_label_loss(self.model, self.stream, [LabelledUtterance(item.input_ids, label)])
            num_tokens = len(self.stream.label_ids[label]) + len(self.stream.line_end_ids)
            gradients = torch.autograd.grad(loss * num_tokens, self.parameters, materialize_grads=True)
            sums = [s + g.square() for s, g in zip(sums, gradients, strict=True)]
        mean = [s / len(sampled) for s in sums]
        return [a + b for a, b in zip(self.ewc.fisher, mean, strict=True)] if self.ewc.fisher else mean

    def score(self, items: Sequence[LabelledUtterance], seen_classes: Sequence[int] | None = None) -> ScoreArray:
        self.module.eval()
        scores = score_after(self.model, self.stream, self.model.initial_state(1), items, seen_classes)
        self.module.train()
        return scores


def first_per_class(items: Sequence[LabelledUtterance], n: int) -> list[LabelledUtterance]:
    counts: dict[int, int] = {}
    selected: list[LabelledUtterance] = []
    for item in items:
        counts[item.label] = counts.get(item.label, 0) + 1
        if counts[item.label] <= n:
            selected.append(item)
    return selected


def compute_label_loss(model: StatefulLM, stream: ClassIncrementalStream, batch: Sequence[LabelledUtterance]) -> Tensor:
    """Return the mean cross-entropy, in nats per token, on the labels and the line ends."""
    rows = [stream.start_ids + stream.training_ids(item) for item in batch]
    ids, mask = pad_rows(rows, device=get_device(model))
    targets = ids.roll(-1, 1).masked_fill(~mask.roll(-1, 1), IGNORE_INDEX)
    targets[:, -1] = IGNORE_INDEX
    for row, item in zip(targets, batch, strict=True):
        row[: len(stream.start_ids) + len(item.input_ids) - 1] = IGNORE_INDEX
    hidden_states = read_ids(model, ids, model.initial_state(len(ids)), mask).hidden_states
    return masked_cross_entropy(model.logits, hidden_states, targets).loss
