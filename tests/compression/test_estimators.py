"""Prices, priors and the stop head's estimators against their oracles."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.halting.estimators import (
    best_length_label,
    expected_memory_size,
    first_slots_mask,
    length_entropy,
    length_penalty,
    mark_priced_everywhere,
    mark_priced_if_read,
    mean_field_gate,
    penalty_ramp,
    ponder_loss,
    ratio_penalty,
    sample_column,
)
from laconic.halting.stop_distribution import (
    StopPosition,
    expected_length,
    length_probs,
    log_survival_gate,
    mask_disallowed_stops,
)
from tests import tolerances
from tests.compression.test_stop_distribution import EVERY, golden, logits, select_misreadings
from tests.oracles.compare import agree, distance
from tests.oracles.estimators import MISREAD, ORACLE
from tests.reference.halting import entropy_floor_penalty, kl_geometric, straight_through_slots, update_price

SCORED = torch.tensor([[False, True, False, True], [True, True, True, False], [False, True, False, False]])
HARD = torch.tensor([False, True, False])


@pytest.mark.equation("halting", "VL8")
def test_length_penalty() -> None:
    def compute(E: Tensor, scored: Tensor, hard: Tensor, beta: float, when: tuple[Any, ...]) -> Tensor:
        return length_penalty(E, mark_priced_if_read(scored, hard), beta, penalty_ramp(*when))

    E = 1 + 3 * torch.rand(3, 4).double()
    agree(compute, ORACLE["VL8"], MISREAD["VL8"], E, SCORED, HARD, 0.3, (63, 100, 0.5, 0.25))
    assert gradcheck(lambda E: length_penalty(E, mark_priced_if_read(SCORED), 0.3), E.requires_grad_())
    assert mark_priced_if_read(SCORED).tolist() == [
        [True, True, True, False],
        [True, True, False, False],
        [True] + [False] * 3,
    ]
    rise = [penalty_ramp(step, 8, 0.5, 0.25) for step in range(8)]
    assert rise == [0, 0, 0, 0, 0, 0.5, 1, 1]
    assert [penalty_ramp(step, 4, 0.5, 0.0) for step in range(4)] == [0, 0, 1, 1]


def windows() -> tuple[Tensor, ...]:
    """Return E[N], masks of text and old memory, and log s; one segment has no text."""
    text = torch.arange(7) < torch.tensor([[7, 5, 6], [4, 3, 0]])[..., None]
    memory = torch.arange(4) < torch.tensor([[0, 3, 2], [1, 4, 2]])[..., None]
    return 1 + 3 * torch.rand(2, 3).double(), text, memory, -torch.rand(2, 3, 4).double()


def ratio_of(
    E: Tensor, text: Tensor, memory: Tensor, log_s: Tensor, counted: Tensor, price: float, alpha: float
) -> tuple[Tensor, ...]:
    E, log_s = E.detach().requires_grad_(), log_s.detach().requires_grad_()
    memory_mask = torch.stack([expected_memory_size(memory[:, k], log_s[:, k]) for k in range(E.shape[1])], 1)
    value = ratio_penalty(E, text.sum(2), memory_mask, counted, price, alpha)
    result = torch.autograd.grad(value, (E, log_s), allow_unused=True)
    return (value, *(torch.zeros_like(x) if g is None else g for x, g in zip((E, log_s), result, strict=True)))


@pytest.mark.equation("halting", "VL9")
def test_ratio_penalty() -> None:
    counted = torch.tensor([[True, True, False], [True, True, False]])
    agree(ratio_of, ORACLE["VL9"], MISREAD["VL9"], *windows(), counted, 0.7, 0.5)
    E, text, memory, _ = windows()
    memory_mask = memory.sum(2).double()
    assert gradcheck(lambda E: ratio_penalty(E, text.sum(2), memory_mask, counted, 0.7, 0.5), E.requires_grad_())
    parts = [
        ratio_penalty(*(x[b : b + 1] for x in (E, text.sum(2), memory_mask, counted)), 0.7, 0.5, 4.0) for b in range(2)
    ]
    assert distance(sum(parts), ratio_penalty(E, text.sum(2), memory_mask, counted, 0.7, 0.5)) < tolerances.ORACLE
    assert torch.equal(expected_memory_size(memory[:, 1], None), memory[:, 1].sum(1).float())
    memory_mask.requires_grad_()
    value = ratio_penalty(E, text.sum(2), memory_mask, counted, 0.7, 0.5)
    assert torch.autograd.grad(value, memory_mask, allow_unused=True) == (None,)


@pytest.mark.equation("halting", "VL9")
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_ratio_penalty_of_equal_segments_is_a_length_penalty(alpha: float) -> None:
    """beta = lambda |S| / (|S| + alpha m), for all of w segments: ORACLE["VL8"] of that beta over w |S| tokens."""
    E, tokens, m = 1 + torch.rand(2, 3).double(), torch.full((2, 3), 12), torch.full((2, 3), 5.0).double()
    all_ = torch.ones(2, 3).bool()
    beta = 0.7 * 12 / (12 + alpha * 5)
    result = ratio_penalty(E, tokens, m, all_, 0.7, alpha)
    assert distance(result, length_penalty(E, all_, beta) / (2 * 3 * 12)) < tolerances.ORACLE


@pytest.mark.equation("halting", "CP6")
def test_published_ratio_penalty() -> None:
    def compute(E: Tensor, text: Tensor, memory: Tensor, log_s: Tensor, price: float) -> Tensor:
        memory_mask = torch.stack([expected_memory_size(memory[:, k], log_s[:, k]) for k in range(E.shape[1])], 1)
        return ratio_penalty(E, text.sum(2), memory_mask, mark_priced_everywhere(text.sum(2)), price, alpha=1.0)

    agree(compute, ORACLE["CP6"], MISREAD["CP6"], *windows(), 0.7)


@pytest.mark.equation("halting", "VL10")
@pytest.mark.parametrize("index", ["after", "before"])
def test_kl_geometric(index: StopPosition) -> None:
    agree(kl_geometric, ORACLE["VL10"], MISREAD["VL10"], logits(3, 5), 0.25, index)
    assert gradcheck(lambda a: kl_geometric(a, 0.25, index), logits(2, 4).requires_grad_())


def test_kl_and_entropy_golden_values() -> None:
    """lam = .1, .2, .4, .7: entropy, and KL divergence from a geometric of .25."""
    a = golden()
    assert round(length_entropy(a).item(), 4) == 1.26
    assert round(kl_geometric(a, 0.25).item(), 4) == 0.3362


def test_kl_geometric_is_price_minus_entropy() -> None:
    """KL = -H(P) + (E[N] - 1) log(1 / (1 - g)) + a last term, so the prior is a price minus entropy."""
    a, g = logits(4, 6), torch.tensor(0.3).double()
    last = ((1 - (1 - g) ** 6) / g).log()
    expected = -length_entropy(a) - (expected_length(a) - 1) * (1 - g).log() + last
    assert distance(kl_geometric(a, 0.3), expected) < tolerances.FLOAT32


def test_entropy_of_impossible_lengths_has_finite_gradient() -> None:
    for a in (
        mask_disallowed_stops(logits(2, 4), (1, 4)),
        torch.full((2, 4), -800.0).double(),
        torch.full((2, 4), 90.0),
    ):
        a = a.clone().requires_grad_()
        (slope,) = torch.autograd.grad((length_entropy(a) + kl_geometric(a, 0.25)).sum(), a)
        assert slope.isfinite().all()
        assert length_entropy(a).isfinite().all()


@pytest.mark.equation("halting", "VL11")
@EVERY
def test_entropy_floor(index: StopPosition) -> None:
    a = torch.cat([logits(4, 4) + 1, torch.zeros(1, 4).double(), torch.full((1, 4), 5.0).double()])
    agree(entropy_floor_penalty, ORACLE["VL11"], MISREAD["VL11"], a, 0.3, 1.1, index)
    assert gradcheck(lambda a: entropy_floor_penalty(a, 0.3, 1.1, index), a[-2:].clone().requires_grad_())


@pytest.mark.equation("halting", "VL12")
def test_update_price() -> None:
    def compute(beta: float, lengths: list[float], target: float, eta: float, max_price: float) -> Tensor:
        mean, result = None, []
        for length in lengths:
            beta, mean = update_price(beta, mean, length, target, eta, max_price)
            result.append(beta)
        return torch.tensor(result, dtype=torch.float64)

    agree(compute, ORACLE["VL12"], MISREAD["VL12"], 0.01, [3.0] * 40 + [9.0] * 200, 4.0, 0.05, 2.0)


@pytest.mark.equation("halting", "VL19")
@EVERY
def test_mean_field(index: StopPosition) -> None:
    agree(mean_field_gate, ORACLE["VL19"], MISREAD["VL19"], logits(3, 5), index)
    assert gradcheck(lambda a: mean_field_gate(a, index), logits(2, 4).requires_grad_())


@pytest.mark.equation("halting", "VL21")
@EVERY
def test_straight_through(index: StopPosition) -> None:
    def compute(a: Tensor, N: Tensor, index: StopPosition) -> tuple[Tensor, ...]:
        a = a.detach().requires_grad_()
        valid, log_s = straight_through_slots(a, N, index)
        return valid.double(), log_s, torch.autograd.grad((log_s * torch.arange(1, 6)).sum(), a)[0]

    agree(compute, ORACLE["VL21"], MISREAD["VL21"], logits(3, 5), torch.tensor([2, 5, 3]), index)
    assert gradcheck(lambda a: log_survival_gate(a, index), logits(2, 4).requires_grad_())  # whose gradient it lends


@pytest.mark.equation("halting", "VL22")
@EVERY
def test_ponder(index: StopPosition) -> None:
    lengths = (1, 3, 4, 6) if index == "after" else (0, 1, 3, 6)
    nats = 5 * torch.rand(3, 4).double()
    blind = () if index == "after" else ("P of the length's place in the list",)
    agree(
        ponder_loss,
        ORACLE["VL22"],
        select_misreadings(MISREAD["VL22"], *blind),
        logits(3, 6),
        nats,
        lengths,
        0.4,
        index,
    )
    a = logits(3, 6).requires_grad_()
    assert gradcheck(lambda a, nats: ponder_loss(a, nats, lengths, 0.4, index), (a, nats.requires_grad_()))


@pytest.mark.equation("halting", "VL24")
def test_best_length_label() -> None:
    nats = 2 * torch.rand(30, 4).double()
    nats[:3] = torch.tensor([4.0, 3.5, 2.5, 3.0])  # .5 a vector: 1 and 2 and 4 cost the same
    result = best_length_label(nats.requires_grad_(), (1, 2, 4, 8), 0.5)
    agree(lambda *x: best_length_label(*x).double(), ORACLE["VL24"], MISREAD["VL24"], nats.detach(), (1, 2, 4, 8), 0.5)
    assert not result.requires_grad
    assert result[:3].tolist() == [0] * 3


@EVERY
def test_sample_column(index: StopPosition) -> None:
    p = length_probs(mask_disallowed_stops(logits(2, 4), (1, 2, 4), index), index)
    u = (torch.arange(100_000).double() + 0.5) / 100_000  # every quantile once
    for row in p:
        result = sample_column(row.expand(len(u), -1), u).bincount(minlength=len(row)) / len(u)
        assert float((result - row).abs().max()) < 1e-4
    assert sample_column(torch.tensor([[0.3, 0.69999, 0.0]]), torch.tensor([0.999999]).double()).item() == 1


def test_first_slots_mask() -> None:
    assert first_slots_mask(torch.tensor([0, 2, 3]), 3).tolist() == [[False] * 3, [True, True, False], [True] * 3]
