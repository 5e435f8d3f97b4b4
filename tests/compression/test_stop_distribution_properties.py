"""Properties of the stop distribution, stop rules and budgets; gradients of estimators."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from laconic.compression.memory import SummaryMemory
from laconic.halting.estimators import (
    ponder_loss,
    sample_column,
)
from laconic.halting.stop_distribution import (
    StopPosition,
    expected_length,
    first_stop,
    length_by_quantile,
    length_by_threshold,
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


# ---- gradients of estimators ---------------------------------------------------------------------------

K = 4
LENGTHS = torch.arange(1.0, K + 1).double()


@pytest.fixture
def table() -> Tensor:
    """CE_2(N), the loss of the next segment after each length."""
    return 3 * torch.rand(K).double()


def test_ponder_is_exact(table: Tensor) -> None:
    a = torch.randn(K).double().requires_grad_()
    exact = (length_probs(a[None])[0] * (table + BETA * LENGTHS)).sum()
    (expected,) = torch.autograd.grad(exact, a)
    result = ponder_loss(a[None], table[None], tuple(range(1, K + 1)), BETA)[0]
    assert distance(torch.autograd.grad(result, a)[0], expected) < tolerances.ORACLE
    assert distance(result, exact) < tolerances.ORACLE


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
