"""Fine-tuning baselines: loss of a line, EWC's penalty and Fisher information, replay reservoir."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from laconic.evaluation.class_incremental.finetune_baselines import (
    EWCPenalty,
    FinetuneConfig,
    FinetunedLearner,
    ReplayReservoir,
    compute_label_loss,
    first_per_class,
)
from laconic.evaluation.class_incremental.protocol import compute_metrics, run_stream
from laconic.evaluation.class_incremental.tasks import LabelledUtterance
from laconic.evaluation.streams.evaluate import CacheAsState
from tests import tolerances
from tests.evaluation import streamed
from tests.oracles import class_incremental as oracle

TASKS = streamed.tasks()


def test_compute_label_loss_matches_loop_oracle() -> None:
    model = CacheAsState(streamed.decoder())
    batch = TASKS.train[0][:3]
    total, count = 0.0, 0
    for item in batch:
        row = [*TASKS.start_ids, *TASKS.training_ids(item)]
        logits = model.decoder.logits(model.decoder(model.decoder.embed(torch.tensor([row]))).hidden_states)[0].tolist()
        begin = len(TASKS.start_ids) + len(item.input_ids)
        for t in range(begin, len(row)):
            total -= oracle.log_probability(logits[t - 1], row[t])
            count += 1
    assert compute_label_loss(model, TASKS, batch).item() == pytest.approx(total / count, rel=tolerances.FLOAT32)


def test_finetuned_learner_learns_on_a_copy() -> None:
    model = CacheAsState(streamed.decoder())
    before = [p.clone() for p in model.decoder.parameters()]
    learner = FinetunedLearner(model, TASKS, FinetuneConfig(learning_rate=1e-2, batch_size=4))
    at_first = compute_label_loss(learner.model, TASKS, TASKS.train[0]).item()
    for _ in range(6):
        learner.learn(TASKS.train[0])
    assert compute_label_loss(learner.model, TASKS, TASKS.train[0]).item() < 0.5 * at_first
    assert learner.num_updates == 12
    assert all(torch.equal(p, q) for p, q in zip(model.decoder.parameters(), before, strict=True))
    assert learner.module is not model.decoder


@pytest.mark.parametrize("has_levels", [False, True])
def test_lora_trains_the_adapter_alone(has_levels: bool) -> None:
    model = streamed.attending() if has_levels else CacheAsState(streamed.decoder())
    config = FinetuneConfig(learning_rate=3e-3, batch_size=4, lora_rank=2)
    learner = FinetunedLearner(model, TASKS, config, use_lora=True)
    adapter = {name for name, p in learner.module.named_parameters() if p.requires_grad}
    assert len(adapter) == len(learner.parameters) == 2 * 2 * (4 if has_levels else 7)
    assert all(".lora_" in name for name in adapter)
    assert learner.optimizer.param_groups[0]["lr"] == 10 * config.learning_rate
    before = {name: p.clone() for name, p in learner.module.named_parameters()}
    at_first = compute_label_loss(learner.model, TASKS, TASKS.train[0]).item()
    assert at_first == pytest.approx(compute_label_loss(model, TASKS, TASKS.train[0]).item())
    for _ in range(6):
        learner.learn(TASKS.train[0])
    assert compute_label_loss(learner.model, TASKS, TASKS.train[0]).item() < 0.7 * at_first
    changed = {name for name, p in learner.module.named_parameters() if not torch.equal(p, before[name])}
    assert changed == adapter


def test_finetuned_learner_forgets() -> None:
    """Check of the pipeline: plain fine-tuning forgets, as is well known."""
    stream = streamed.tasks(train_per_class=24, test_per_class=6)
    config = FinetuneConfig(learning_rate=3e-3, batch_size=4)
    learner = FinetunedLearner(CacheAsState(streamed.decoder(width=32)), stream, config)
    metrics = compute_metrics(run_stream(learner, stream))
    assert metrics.plasticity is not None
    assert metrics.plasticity > 0.8
    assert metrics.forgetting is not None
    assert metrics.forgetting > 0.3


def test_ewc_penalty_matches_loop_oracle() -> None:
    theta = [torch.tensor([1.0, -2.0]), torch.tensor([[0.5]])]
    fisher, star = ([torch.tensor(x), torch.tensor([[y]])] for x, y in (([2.0, 1.0], 4.0), ([0.0, -1.0], 1.0)))
    anchor = EWCPenalty(fisher, star)
    assert float(anchor.compute(theta)) == pytest.approx((2 * 1 + 1 * 1 + 4 * 0.25) / 2)
    assert EWCPenalty().compute(theta) == 0


def ewc(weight: float = 100.0) -> FinetunedLearner:
    config = FinetuneConfig(ewc_weight=weight, batch_size=4, fisher_per_class=2)
    return FinetunedLearner(CacheAsState(streamed.decoder()), TASKS, config, ewc=EWCPenalty())


def squares(learner: FinetunedLearner, items: Sequence[LabelledUtterance], labels: Sequence[int]) -> torch.Tensor:
    """Return the mean squared gradient of log p of each label and the line end, by loops."""
    total = torch.zeros_like(learner.parameters[0])
    for item, label in zip(items, labels, strict=True):
        row = [*TASKS.start_ids, *item.input_ids, *TASKS.label_ids[label], *TASKS.line_end_ids]
        output = learner.model.read_tokens(torch.tensor([row]), update_weights=False)
        logits = learner.model.logits(output.hidden_states)[0]
        begin = len(TASKS.start_ids) + len(item.input_ids)
        loss = F.cross_entropy(logits[begin - 1 : -1], torch.tensor(row[begin:]), reduction="sum")
        total += torch.autograd.grad(loss, learner.parameters[0])[0].square()
    return total / len(items)


@pytest.mark.medium
def test_fisher_information_samples_labels_from_the_model() -> None:
    learner = ewc()
    items = TASKS.train[0]
    learner.learn(items)
    assert learner.ewc is not None
    chosen = first_per_class(items, 2)
    fisher, choices = learner.ewc.fisher[0], product(sorted(learner.seen_classes), repeat=len(chosen))
    near = [
        labels for labels in choices if tolerances.error(fisher, squares(learner, chosen, labels)) < tolerances.FLOAT32
    ]
    assert len(near) == 1  # exactly one choice of labels explains it
    truth = squares(learner, chosen, [item.label for item in chosen])
    assert tolerances.error(fisher, truth) > 1e-3  # MISREAD: with the labels of the examples it is the empirical Fisher


def test_fisher_information_accumulates_over_tasks() -> None:
    learner = ewc()
    learner.learn(TASKS.train[0])
    assert learner.ewc is not None
    first, star = learner.ewc.fisher[0].clone(), learner.ewc.theta_star[0].clone()
    learner.learn(TASKS.train[1])
    assert bool((learner.ewc.fisher[0] >= first).all())
    assert float((learner.ewc.fisher[0] - first).max()) > 0
    assert torch.equal(learner.ewc.theta_star[0], learner.parameters[0])
    assert not torch.equal(star, learner.parameters[0])


def test_ewc_penalty_keeps_important_weights() -> None:
    moved: list[float] = []
    for weight in (0.0, 1e4):
        learner = ewc(weight)
        learner.learn(TASKS.train[0])
        assert learner.ewc is not None
        before = EWCPenalty(learner.ewc.fisher, learner.ewc.theta_star)
        learner.learn(TASKS.train[1])
        learner.learn(TASKS.train[1])
        moved.append(float(torch.as_tensor(before.compute(learner.parameters)).detach()))
    assert moved[1] < 0.5 * moved[0]


def test_replay_reservoir_is_a_uniform_sample() -> None:
    counts: Counter[int] = Counter()
    for seed in range(200):
        reservoir = ReplayReservoir(5, seed)
        for n in range(20):
            reservoir.add(LabelledUtterance((n,), 7))
            if n % 2:
                reservoir.add(LabelledUtterance((n,), 8))
        assert [len(reservoir.examples[label]) for label in (7, 8)] == [5, 5]
        counts.update(item.input_ids[0] for item in reservoir.examples[7])
    assert min(counts[n] for n in range(20)) > 20  # 50 are expected of each, with a spread of 6
    assert max(counts.values()) < 80
    sample = reservoir.sample(6, 3)
    assert len(set(sample)) == 6
    assert sample == reservoir.sample(6, 3) != reservoir.sample(6, 4)
    assert len(reservoir.sample(99, 0)) == 10
    assert ReplayReservoir(5, 0).sample(3, 0) == []


def test_replay_fills_half_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = FinetuneConfig(batch_size=4, replay_per_class=1)
    learner = FinetunedLearner(CacheAsState(streamed.decoder()), TASKS, config, replay=ReplayReservoir(1, 0))
    seen: list[list[int]] = []
    monkeypatch.setattr(learner, "update", lambda batch: seen.append([item.label for item in batch]))
    learner.learn(TASKS.train[0])
    assert [len(batch) for batch in seen] == [4, 4]
    seen.clear()
    learner.learn(TASKS.train[1])
    assert [len(batch) for batch in seen] == [4] * 4
    assert all(set(batch[2:]) <= set(TASKS.task_classes[0]) for batch in seen)
    assert all(set(batch[:2]) <= set(TASKS.task_classes[1]) for batch in seen)
