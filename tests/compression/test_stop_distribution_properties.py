"""Properties of the stop distribution, stop rules and budgets; estimator gradients over all outcomes."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laconic.compression.memory import SummaryMemory
from laconic.halting.estimators import (
    cost_to_go,
    length_penalty,
    mark_priced_if_read,
    ponder_loss,
    reinforce_two_samples,
    sample_column,
)
from laconic.halting.stop_distribution import (
    StopPosition,
    expected_length,
    first_stop,
    length_by_quantile,
    length_by_threshold,
    length_log_probs,
    length_probs,
    length_support,
    log_survival,
    log_survival_gate,
    mask_disallowed_stops,
    stop_by_sampling,
)
from tests import tolerances
from tests.oracles.compare import distance
from tests.reference.halting import straight_through_slots

EVERY_STOP_POSITION = pytest.mark.parametrize("index", ["after", "before", "mixture"])
BETA = 0.3


@st.composite
def heads(draw: st.DrawFn) -> Tensor:
    """Stop logits of up to three rows and nine positions, from never stopping to stopping at once."""
    B, K = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    wide = draw(st.sampled_from([0.5, 3.0, 30.0]))
    return wide * torch.randn(B, K, generator=generator, dtype=torch.float64) - draw(st.sampled_from([0.0, 4.0]))


# ---- the distribution of N ----------------------------------------------------------------------------------------


@given(heads(), st.sampled_from(["after", "before"]))
def test_length_probs_sum_to_one_and_match_survival(a: Tensor, index: StopPosition) -> None:
    """P sums to 1, its mean is the sum of survivals, decreasing from 1; "before" has E[N] smaller by 1 - s_{K+1}."""
    s, P = log_survival(a).exp(), length_probs(a, index)
    n = torch.arange(P.shape[1]) + int(index == "after")
    assert bool((s[:, 0] == 1).all())
    assert bool((s.diff(dim=1) <= 0).all())
    assert distance(P.sum(1), torch.ones(len(a)).double()) < tolerances.ORACLE
    assert float((expected_length(a, index) - P @ n.double()).abs().max()) < tolerances.ORACLE * a.shape[1]
    less = expected_length(a, "after") - expected_length(a, "before")
    assert float((less - (1 - s[:, -1])).abs().max()) < tolerances.ORACLE * a.shape[1]


@EVERY_STOP_POSITION
def test_stop_by_sampling_follows_the_distribution(index: StopPosition) -> None:
    """10^5 samples of N: mean within 4 standard errors, each share within 5; "mixture" keeps by s_{t+1}."""
    a = torch.tensor([[-1.5, -0.4, 0.3, -2.0, 0.1]]).double()
    selected: StopPosition = "before" if index == "mixture" else index
    N = first_stop(stop_by_sampling(a.expand(100_000, -1), torch.rand(100_000, 5).double()), index).double()
    error = float(N.std()) / len(N) ** 0.5
    assert abs(float(N.mean()) - expected_length(a, selected).item()) < 4 * error
    P = length_probs(a, index)[0]
    shares = N.long().bincount(minlength=6)[int(index == "after") :] / len(N)
    assert bool(((shares - P).abs() < 5 * (P * (1 - P) / len(N)).sqrt() + 1e-12).all())


@given(heads(), st.floats(0.01, 0.99), st.sampled_from(["after", "before"]))
def test_stop_rules_are_per_row_and_final(a: Tensor, q: float, index: StopPosition) -> None:
    """A row's N does not depend on other rows, nor on logits after the stop."""
    u = (a * 7.3).frac().abs()
    for compute in (
        lambda a, u: length_by_quantile(a, q, index),
        lambda a, u: length_by_threshold(a, q, index),
        lambda a, u: first_stop(stop_by_sampling(a, u), index),
    ):
        N = compute(a, u)
        assert torch.equal(N, torch.cat([compute(a[b : b + 1], u[b : b + 1]) for b in range(len(a))]))
        position_list = torch.arange(1, a.shape[1] + 1)
        after = position_list > N[:, None] + int(index != "after")
        assert torch.equal(compute(a.masked_fill(after, 9.0), u), N)
        assert torch.equal(compute(a.masked_fill(after, -9.0), u), N)
        assert int(index == "after") <= int(N.min()) <= int(N.max()) <= a.shape[1]


@given(heads(), st.integers(0, 30), st.integers(1, 3))
def test_keep_top_vectors_keeps_prefixes(a: Tensor, budget: int, blocks: int) -> None:
    (B, K), memory = a.shape, SummaryMemory.empty(len(a), 1)
    for k in range(blocks):
        mask = torch.arange(K) < torch.tensor([(b + k) % K + 1 for b in range(B)])[:, None]
        slots = torch.arange(K, dtype=torch.float32).expand(B, K)[..., None]
        memory = memory.append(slots, mask, torch.full((B,), 3), log_survival_gate(a / (k + 1)).float())
    selected = memory.keep_top_vectors(budget)
    assert torch.equal(selected.num_vectors, memory.num_vectors.clamp(max=budget))
    for b in range(B):
        for k in range(blocks):
            slots = selected.vectors[b][selected.valid[b] & (selected.segment_ids[b] == k)][:, 0]
            assert slots.tolist() == list(range(len(slots)))


# ---- estimator gradients over all outcomes -------------------------------------------------------------

K = 4
LENGTHS = torch.arange(1.0, K + 1).double()


def outcomes(n: int) -> Tensor:
    """All tuples of n lengths from 1 to K."""
    return torch.tensor(list(product(range(1, K + 1), repeat=n)))


def picked(a: Tensor, N: Tensor) -> Tensor:
    """log P(N) for logits [.., K] and one length each."""
    return length_log_probs(a.reshape(-1, K)).gather(1, N.reshape(-1, 1) - 1).reshape(N.shape)


@pytest.fixture
def table() -> Tensor:
    """CE_2(N), the loss of the next segment after each length."""
    return 3 * torch.rand(K).double()


def test_reinforce_is_unbiased_and_ponder_is_exact(table: Tensor) -> None:
    """w = 2: the mean over the 16 outcomes of (N, N') of score term plus price has the exact gradient.

    A row is an outcome. Its probability multiplies G and E[N], since the terms are linear in these.
    """
    a, B = torch.randn(K).double().requires_grad_(), K**2
    exact = (length_probs(a[None])[0] * (table + BETA * LENGTHS)).sum()
    (expected,) = torch.autograd.grad(exact, a)
    N, counted = outcomes(2).T, mark_priced_if_read(torch.tensor([[False, True]])).expand(B, 2)
    log_p = torch.stack([picked(a.expand(2, B, K), N), torch.zeros(2, B).double()], -1)
    chance = log_p.sum((0, 2)).exp().detach()
    nats = torch.stack([torch.zeros(2, B).double(), table[N - 1]], -1)
    E = torch.stack([expected_length(a.expand(B, K)), torch.zeros(B).double()], -1)
    G = cost_to_go(nats, (BETA * E * counted).expand(2, B, 2))
    estimate = reinforce_two_samples(log_p, chance[:, None] * G, counted) + length_penalty(
        chance[:, None] * E, counted, BETA
    )
    assert distance(torch.autograd.grad(estimate, a)[0], expected) < tolerances.ORACLE
    result = ponder_loss(a[None], table[None], tuple(range(1, K + 1)), BETA)[0]
    assert distance(torch.autograd.grad(result, a)[0], expected) < tolerances.ORACLE
    assert distance(result, exact) < tolerances.ORACLE


def test_reinforce_is_unbiased_in_longer_windows() -> None:
    """w = 3: segment 2 is read after N_1 vectors and stops by logits that N_1 chose, segment 3 after (N_1, N_2)."""
    first, second = torch.randn(K).double().requires_grad_(), torch.randn(K, K).double().requires_grad_()
    CE2, CE3, B = 3 * torch.rand(K).double(), 3 * torch.rand(K, K).double(), K**4
    later = (length_probs(second) * (CE3 + BETA * LENGTHS)).sum(1)
    exact = (length_probs(first[None])[0] * (CE2 + BETA * LENGTHS + later)).sum()
    N = outcomes(4).reshape(B, 2, 2).transpose(0, 1)  # two draws of (N_1, N_2)
    n, none = N - 1, torch.zeros(2, B, 1).double()
    a = torch.stack([first.expand(2, B, K), second[n[..., 0]]], 2)
    log_p = torch.cat([picked(a, N), none], -1)
    E = torch.cat([expected_length(a.reshape(-1, K)).reshape(2, B, 2), none], -1)
    nats = torch.stack([none[..., 0], CE2[n[..., 0]], CE3[n[..., 0], n[..., 1]]], -1)
    chance, counted = log_p.sum((0, 2)).exp().detach(), torch.tensor([True, True, False]).expand(B, 3)
    estimate = reinforce_two_samples(log_p, chance[:, None] * cost_to_go(nats, BETA * E), counted)
    estimate = estimate + length_penalty(chance[:, None] * E.mean(0), counted, BETA)
    expected = torch.autograd.grad(exact, (first, second))
    assert distance(torch.autograd.grad(estimate, (first, second)), expected) < tolerances.ORACLE


def test_straight_through_and_mean_field_are_not_the_expectation(table: Tensor) -> None:
    """For the loss -log of a mean over slots, the gradients of both estimators differ from the exact one."""
    a = torch.randn(1, K).double().requires_grad_()
    value = torch.rand(K).double() + 0.1

    def nats(mask: Tensor, log_s: Tensor) -> Tensor:
        weight = mask * log_s.exp()
        return -((weight * value).sum(-1) / weight.sum(-1)).log()

    hard = torch.stack([nats((torch.arange(K) < n).double(), torch.zeros(K).double()) for n in range(1, K + 1)])
    (expected,) = torch.autograd.grad((length_probs(a)[0] * hard).sum(), a)
    (soft,) = torch.autograd.grad(nats(torch.ones(K).double(), log_survival_gate(a)[0]), a)
    through = torch.zeros_like(expected)
    for n in range(1, K + 1):
        (valid,), (log_s,) = straight_through_slots(a, torch.tensor([n]))
        chance = length_probs(a)[0, n - 1].detach()
        through += chance * torch.autograd.grad(nats(valid.double(), log_s), a)[0]
    assert distance(soft, expected) > 1e-2
    assert distance(through, expected) > 1e-2


def test_sample_column_follows_the_distribution() -> None:
    """`sample_column` and `stop_by_sampling` follow the same distribution over allowed lengths."""
    a = mask_disallowed_stops(torch.randn(1, 6).double(), (1, 3, 6))
    u = (torch.arange(50_000).double() + 0.5) / 50_000
    result = sample_column(length_probs(a).expand(len(u), -1), u) + 1
    assert set(result.tolist()) == set(length_support((1, 3, 6)))
    assert abs(float(result.double().mean()) - expected_length(a).item()) < 1e-3
