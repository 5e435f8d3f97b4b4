"""AdamW and its schedule equal a plain torch loop bit for bit."""

import math

import pytest
import torch
from torch import nn

from laconic import rng
from laconic.config.training import TrainingConfig
from laconic.errors import UsageError
from laconic.training.loop import train
from laconic.training.optim import build_adamw
from laconic.training.run import TrainingSetup
from laconic.training.step import learning_rate_at
from tests.training.toy import ToyData, ToyMethod


def cosine(step: int, steps: int, warmup: int, floor: float) -> float:
    if step < warmup:
        return step / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * ((step - warmup) / (steps - warmup))))


def plain_loop(toy: ToyMethod, points: ToyData, seed: int, steps: int) -> list[float]:
    """Train with torch's AdamW, LambdaLR and clipping, in micro-batches of 3 rows; only the order is laconic's."""
    matrices = [p for p in toy.parameters() if p.ndim == 2]
    vectors = [p for p in toy.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, steps, 3, 0.02))
    torch.manual_seed(seed)
    norms: list[float] = []
    for step in range(steps):
        epoch, i = divmod(step, len(points) // 8)
        rows = [int(rng.permuted_index(seed, epoch, 8 * i + j, len(points))) for j in range(8)]
        for piece in (rows[0:3], rows[3:6], rows[6:8]):
            output = toy.second(toy.dropout(toy.norm(torch.relu(toy.first(points.x[piece])))))
            far = (output - points.y[piece]).abs()
            (far.square().sum() / 8 + 0.1 * (far.sum() / 8)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(toy.parameters(), 0.5).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return norms


def test_train_equals_a_plain_loop() -> None:
    steps, ours, plain = 17, ToyMethod(), ToyMethod()
    optimizer = {
        "learning_rate": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 3,
        "min_lr_ratio": 0.02,
    }  # fmt: skip
    config = TrainingConfig(steps=steps, batch_size=8, micro_batch_size=3, **optimizer)  # type: ignore[arg-type]
    output = train(TrainingSetup(ours, ToyData(), config, seed=11))
    plain.train()
    norms = plain_loop(plain, ToyData(), 11, steps)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    assert output.metrics["grad_norm"] == norms[-1]
    assert norms[-1] > 0.5, "the clip had nothing to do"


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_learning_rate_schedules(schedule: str, floor: float) -> None:
    config = TrainingConfig(steps=100, learning_rate=2.0, lr_schedule=schedule, min_lr_ratio=floor, warmup_ratio=0.1)  # type: ignore[arg-type]
    rates = [learning_rate_at(config, step, 100, 10) for step in range(101)]
    assert [rates[0], rates[5], rates[10]] == [0, 1, 2]
    end, middle = {"constant": (1.0, 1.0)}.get(schedule, (floor, (1 + floor) / 2))
    assert rates[100] == pytest.approx(2.0 * end)
    assert rates[55] == pytest.approx(2.0 * middle)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_learning_rate_without_warmup_and_of_one_step() -> None:
    assert learning_rate_at(TrainingConfig(steps=1), 0, 1, 0) == 1e-3
    assert learning_rate_at(TrainingConfig(steps=4), 3, 4, 9) == pytest.approx(1e-3 / 3)


def test_adamw_decays_matrices_only() -> None:
    toy = ToyMethod()
    toy.second.weight.requires_grad_(False)
    groups = build_adamw(toy, TrainingConfig(steps=1, weight_decay=0.3)).param_groups
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(toy.first.weight)],
        [id(p) for p in (toy.first.bias, toy.norm.weight, toy.norm.bias, toy.second.bias)],
    ]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def test_adamw_refuses_no_parameters() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter to train"):
        build_adamw(frozen, TrainingConfig(steps=1, trainable="latents"))
