"""The stop distribution, the gate and stop rules against their oracles and golden values."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.compression.halting.inference import fixed_length
from laconic.compression.memory import SummaryMemory
from laconic.errors import UsageError
from laconic.halting import stop_distribution
from laconic.halting.stop_distribution import (
    StopPosition,
    attention_gate_bias,
    draw_uniforms,
    expected_length,
    first_stop,
    length_by_quantile,
    length_by_threshold,
    length_probs,
    log_survival,
    log_survival_gate,
    mask_disallowed_stops,
    scale_by_survival,
    solve_initial_bias,
    stop_by_sampling,
    stop_logit,
    uniform_length,
    vocabulary_stop_logit,
)
from tests import tolerances
from tests.oracles.compare import agree, distance, relative
from tests.oracles.halting import MISREAD, ORACLE

EVERY = pytest.mark.parametrize("index", ["after", "before", "mixture"])
LAM = (0.1, 0.2, 0.4, 0.7)  # the golden values' lam_t


def logits(B: int, K: int) -> Tensor:
    return torch.randn(B, K, dtype=torch.float64) - 0.5


def golden() -> Tensor:
    return torch.tensor([LAM], dtype=torch.float64).logit()


def select_misreadings(misread: dict[str, Any], *blind: str) -> dict[str, Any]:
    """Select the misreadings that these inputs can distinguish; other inputs distinguish the rest."""
    return {name: wrong for name, wrong in misread.items() if name not in blind}


@pytest.mark.equation("halting", "VL3")
def test_stop_logit() -> None:
    u, b, z = torch.randn(5).double(), torch.randn(()).double(), torch.randn(3, 4, 5).double()
    agree(stop_logit, ORACLE["VL3"], MISREAD["VL3"], u, b, z, -3.4, 3.0)
    assert gradcheck(lambda *x: stop_logit(*x, -3.4, 3.0), [x.requires_grad_() for x in (u, b, z)])
    assert stop_logit(0 * u, 0 * b, z[:, 0], -3.4).tolist() == [-3.4] * 3


@pytest.mark.equation("halting", "VL4")
def test_log_survival() -> None:
    def compute(a: Tensor) -> Tensor:
        return log_survival(a)[:, 1:]

    blind = ("1 - p by subtraction in float32", "1 - p in bfloat16")
    agree(compute, ORACLE["VL4"], select_misreadings(MISREAD["VL4"], *blind), logits(3, 6), measure=relative)
    rare = logits(3, 6) / 4 - 14  # p about 1e-6
    agree(compute, ORACLE["VL4"], {name: MISREAD["VL4"][name] for name in blind}, rare, measure=relative)
    assert log_survival(rare)[:, 0].tolist() == [0.0] * 3
    assert gradcheck(log_survival, logits(2, 4).requires_grad_())


@pytest.mark.equation("halting", "VL5")
@EVERY
def test_length_probs(index: StopPosition) -> None:
    agree(length_probs, ORACLE["VL5"], MISREAD["VL5"], logits(3, 5), index)
    assert gradcheck(lambda a: length_probs(a, index), logits(2, 4).requires_grad_())


@pytest.mark.equation("halting", "VL6")
@EVERY
def test_expected_length(index: StopPosition) -> None:
    agree(expected_length, ORACLE["VL6"], MISREAD["VL6"], logits(3, 5), index)
    assert gradcheck(lambda a: expected_length(a, index), logits(2, 4).requires_grad_())


@pytest.mark.equation("halting", "VL7")
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("num_cached", [0, 8])
def test_attention_gate_bias(hard: bool, num_cached: int) -> None:
    """A bos column, three segments with invalid slots, and text; all of them are queries, or only the last columns."""
    block = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, -1, 1, -1, 2, -1]])
    log_s, mask = -torch.rand(2, 7).double() - 0.1, torch.nn.functional.pad(block >= 0, (1, 4), value=True)
    T, P = 12 - num_cached, 12

    def compute(
        scores: Tensor, log_s: Tensor, block: Tensor, mask: Tensor, lead: int, num_cached: int, hard: bool
    ) -> Tensor:
        seen = mask[:, None] & (torch.arange(P) <= torch.arange(num_cached, P)[:, None])
        bias = 0.0 if hard else attention_gate_bias(log_s, block, lead, 4, num_cached)
        return (scores + bias).masked_fill(~seen, -math.inf).softmax(-1)

    blind = {"by key in hard reading too"} if not hard else {
        "s_t on the score", "rows of the same block gated", "after the softmax", "no gate",
        "later blocks read an ungated memory",
    }  # fmt: skip
    if num_cached:
        blind |= {"rows of the same block gated", "later blocks read an ungated memory"}
    scores = torch.randn(2, T, P).double()
    agree(
        compute,
        ORACLE["VL7"],
        select_misreadings(MISREAD["VL7"], *blind),
        scores,
        log_s,
        block,
        mask,
        1,
        num_cached,
        hard,
    )
    assert gradcheck(lambda x: attention_gate_bias(x, block, 1, 4, num_cached), log_s.requires_grad_())


@pytest.mark.equation("halting", "VL13")
@pytest.mark.parametrize(("K", "lam", "b"), [(8, 0.0303, -3.46), (16, 0.0142, -4.24), (50, 0.00437, -5.43)])
def test_solve_initial_bias(K: int, lam: float, b: float) -> None:
    def compute(start: float, K: int) -> float:
        return solve_initial_bias(start, tuple(range(1, K + 1)))

    agree(compute, ORACLE["VL13"], MISREAD["VL13"], 0.9, K)
    result = compute(0.9, K)
    assert float(f"{torch.tensor(result).double().sigmoid().item():.3g}") == lam
    assert round(result, 2) == b
    started = stop_logit(torch.zeros(3), torch.zeros(()), torch.randn(2, K, 3).double(), result)
    assert distance(expected_length(started), torch.full((2,), 0.9 * K, dtype=torch.float64)) < tolerances.ORACLE


@pytest.mark.parametrize("index", ["after", "before", "mixture"])
@pytest.mark.parametrize("lengths", [(1, 2, 4, 8), (3, 6), tuple(range(1, 7))])
def test_solve_initial_bias_with_allowed_lengths(index: StopPosition, lengths: tuple[int, ...]) -> None:
    K = lengths[-1]
    flat = torch.full((1, K), solve_initial_bias(0.7, lengths, index), dtype=torch.float64)
    assert (
        distance(expected_length(mask_disallowed_stops(flat, lengths, index), index), torch.tensor([0.7 * K]).double())
        < tolerances.FLOAT32
    )


@pytest.mark.equation("halting", "VL14")
@EVERY
def test_length_by_threshold(index: StopPosition) -> None:
    a = golden().repeat(4, 1)
    a[1], a[2], a[3] = -2.0, a[0].flip(0), torch.tensor([-1.0, 1.0, -1.0, 2.0])
    blind = ("P(N = t) for lam_t",) if index == "after" else ()
    agree(length_by_threshold, ORACLE["VL14"], select_misreadings(MISREAD["VL14"], *blind), a, 0.3, index)
    met = torch.tensor([[0.1, 0.5, 0.3, 0.2]]).double().logit()
    agree(length_by_threshold, ORACLE["VL14"], {name: MISREAD["VL14"][name] for name in blind}, met, 0.48, index)


@pytest.mark.equation("halting", "VL15")
@EVERY
@pytest.mark.parametrize("q", [0.25, 0.6])
def test_length_by_quantile(index: StopPosition, q: float) -> None:
    rare = torch.tensor([[0.02] * 4, [0.13] * 4], dtype=torch.float64).logit()
    a = torch.cat([golden(), logits(40, 4), rare])
    agree(length_by_quantile, ORACLE["VL15"], MISREAD["VL15"], a, q, index)


@pytest.mark.equation("halting", "VL16")
@EVERY
def test_stop_by_sampling(index: StopPosition) -> None:
    length = lambda a, u, index: first_stop(stop_by_sampling(a, u), index)  # noqa: E731
    agree(length, ORACLE["VL16"], MISREAD["VL16"], logits(40, 5), torch.rand(40, 5).double(), index)


@pytest.mark.equation("halting", "VL17")
def test_fixed_length() -> None:
    K = 6
    for n, blind in ((3, ("n beyond K",)), (9, ("K always",))):
        agree(
            lambda n, K: fixed_length(n, tuple(range(1, K + 1))),
            ORACLE["VL17"],
            select_misreadings(MISREAD["VL17"], *blind),
            n,
            K,
        )
    assert [fixed_length(n, (1, 2, 4)) for n in (1, 2, 4, 5, 50)] == [1, 2, 4, 4, 4]
    with pytest.raises(UsageError, match=r"allowed lengths are 1, 2, 4"):
        fixed_length(3, (1, 2, 4))


@pytest.mark.equation("halting", "VL18")
@pytest.mark.parametrize("b", [2, 3, 5, 40])
def test_top_budget(b: int) -> None:
    """Three segments in two rows, some slots invalid; survival takes few values, so that slots tie."""
    log_s = torch.tensor([[0, 0, -0.5, 0, -0.1, -2, 0, -0.7, -0.9], [0, -0.5, -0.6, 0, -0.5, 0, 0, -0.1, -0.3]])
    block = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, -1, 1, 1, -1, 2, 2, 2]])

    def compute(log_s: Tensor, block: Tensor, b: int) -> Tensor:
        slot = torch.arange(9.0).expand(2, 9)[..., None]
        memory = SummaryMemory(
            slot, block >= 0, block, log_s.float().masked_fill(block < 0, 0.0), torch.full((2, 3), 5)
        )
        selected = memory.keep_top_vectors(b)
        return torch.zeros(2, 10).scatter(1, torch.where(selected.valid, selected.vectors[..., 0].long(), 9), 1.0)[
            :, :9
        ]

    blind = {
        2: {"the same from every block"},
        3: {"the same from every block", "ties to the later block"},
        5: {"ties to the earlier block first", "ties to the later block"},
        40: set(MISREAD["VL18"]),
    }
    agree(compute, ORACLE["VL18"], select_misreadings(MISREAD["VL18"], *blind[b]), log_s.double(), block, b)
    assert compute(log_s, block, b).sum(1).tolist() == [min(b, 9), min(b, 7)]


@pytest.mark.equation("halting", "VL23")
def test_uniform_length() -> None:
    agree(uniform_length, ORACLE["VL23"], MISREAD["VL23"], torch.rand(50).double(), (1, 2, 4, 8))
    everywhere = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert uniform_length(everywhere, (1, 2, 4, 8)).tolist() == [1, 2, 4, 8, 8]


@pytest.mark.equation("halting", "CP3")
def test_vocabulary_stop_logit() -> None:
    x = torch.randn(3, 7).double()
    agree(vocabulary_stop_logit, ORACLE["CP3"], MISREAD["CP3"], x, 5)
    assert distance(vocabulary_stop_logit(x, 5).sigmoid(), x.softmax(-1)[:, 5]) < tolerances.ORACLE
    assert gradcheck(lambda x: vocabulary_stop_logit(x, 5), x.requires_grad_())


@pytest.mark.equation("halting", "CP4")
def test_log_survival_gate_of_the_published_timing() -> None:
    """Gate and E[N] with s_t, a vector kept with s_{t+1}."""

    def compute(a: Tensor, index: StopPosition) -> tuple[Tensor, Tensor]:
        return log_survival_gate(a, index), length_probs(a, index).flip(1).cumsum(1).flip(1)[:, -a.shape[1] :]

    agree(compute, ORACLE["CP4"], MISREAD["CP4"], logits(3, 5), "split")
    for index, blind in (("after", ("kept as it is gated",)), ("before", ("gated as it is kept",))):
        agree(compute, ORACLE["CP4"], select_misreadings(MISREAD["CP4"], *blind), logits(3, 5), index)
    assert gradcheck(lambda a: log_survival_gate(a, "split"), logits(2, 4).requires_grad_())


@pytest.mark.equation("halting", "CP5")
def test_scale_by_survival() -> None:
    vectors, log_s = torch.randn(2, 3, 4).double(), -torch.rand(2, 3).double()
    agree(scale_by_survival, ORACLE["CP5"], MISREAD["CP5"], vectors, log_s)
    assert gradcheck(scale_by_survival, (vectors.requires_grad_(), log_s.requires_grad_()))
    assert scale_by_survival(vectors.bfloat16(), log_s.float()).dtype == torch.bfloat16


def test_stop_distribution_golden_values() -> None:
    """lam = .1, .2, .4, .7: survival, probabilities, mean, its gradient, quantiles."""
    a = golden().requires_grad_()
    wanted = {
        log_survival: (1, 0.9, 0.72, 0.432, 0.1296),
        length_probs: (0.1, 0.18, 0.288, 0.432),
        expected_length: (3.052,),
    }
    for function, expected in wanted.items():
        result = function(a).exp() if function is log_survival else function(a)
        assert distance(result.flatten(), torch.tensor(expected, dtype=torch.float64)) < tolerances.ORACLE
    assert distance(expected_length(a, "before"), torch.tensor([2.1816]).double()) < tolerances.FLOAT32
    (slope,) = torch.autograd.grad(expected_length(a).sum(), a)
    assert distance(slope, torch.tensor([[-0.2052, -0.2304, -0.1728, 0.0]])) < tolerances.FLOAT32
    assert [length_by_quantile(a, q).item() for q in (0.25, 0.5, 0.75)] == [2, 3, 4]
    assert length_by_threshold(a, 0.5).item() == 4
    flat = torch.full((1, 50), 0.05, dtype=torch.float64).logit()
    assert round(expected_length(flat).item(), 1) == 18.5
    assert (length_by_threshold(flat, 0.5).item(), length_by_quantile(flat, 0.5).item()) == (50, 14)


@pytest.mark.parametrize(("K", "mean", "slope"), [(50, 49.98, 1.6e-5), (8, 8.0, 3.6e-7)])
def test_published_stop_head_has_almost_no_gradient_at_first(K: int, mean: float, slope: float) -> None:
    """A vocabulary row of 50,267 starts with p = 2.0e-5: E[N] is K, and the price has almost no gradient."""
    embeds = torch.zeros(1, K, 50_267)
    a = vocabulary_stop_logit(embeds, 50_266).double().requires_grad_()
    assert f"{a.sigmoid()[0, 0].item():.1e}" == "2.0e-05"
    assert round(expected_length(a).item(), 2) == mean
    (result,) = torch.autograd.grad((expected_length(a) / 1536).sum(), a)
    assert f"{-result.sum().item():.1e}" == f"{slope:.1e}"
    rounded = (1 - a.detach().bfloat16().sigmoid()).cumprod(1)
    assert (rounded == 1).all()  # survival by a product in bfloat16: E[N] is K to the last bit
    embeds[0, 0, 7] = 1.0
    embeds.requires_grad_()
    torch.nn.functional.cross_entropy(embeds[:, 0], torch.tensor([3])).backward()
    assert embeds.grad is not None
    assert f"{embeds.grad[0, 0, 50_266].item():.1e}" == "2.0e-05"  # how hard each token of text pushes the stop down


def test_one_minus_p_in_bfloat16_loses_small_p() -> None:
    p = torch.tensor([0.00195, 0.0001], dtype=torch.bfloat16)
    assert (1 - p).tolist() == [1.0, 1.0]
    assert (1 - torch.tensor(0.00198, dtype=torch.bfloat16)).item() < 1


def test_log_survival_upcasts_bfloat16_logits() -> None:
    a = (torch.randn(4, 50) - 5).bfloat16()
    for index in ("after", "before"):
        exact = expected_length(a.double(), index)
        assert expected_length(a, index).dtype == torch.float32
        assert distance(expected_length(a, index), exact) < tolerances.FLOAT32
    assert distance(log_survival(a)[:, 1:], log_survival(a.double())[:, 1:], relative) < tolerances.FLOAT32
    with torch.autocast("cpu", torch.bfloat16):
        u, b, z = torch.randn(48), torch.zeros(()), torch.randn(2, 3, 48).bfloat16()
        assert distance(stop_logit(u, b, z), z.double() @ u.double()) < tolerances.FLOAT32


@EVERY
def test_mask_disallowed_stops_excludes_lengths(index: StopPosition) -> None:
    lengths = (2, 3, 6)
    a = mask_disallowed_stops(logits(3, 6).requires_grad_(), lengths, index)
    least = int(index == "after")
    result = {n + least for n in range(6 + 1 - least) if bool((length_probs(a, index)[:, n] > 0).any())}
    assert result == set(stop_distribution.length_support(lengths, index))
    N = torch.cat([length_by_quantile(a, q, index) for q in (0.01, 0.3, 0.6, 0.99)])
    sampled = first_stop(stop_by_sampling(a.repeat(200, 1), torch.rand(600, 6)), index)
    assert {*N.tolist(), *sampled.tolist()} <= result
    (slope,) = torch.autograd.grad(expected_length(a, index).sum(), a)
    assert slope.isfinite().all()


def test_stop_distribution_rejects_impossible_lengths() -> None:
    with pytest.raises(UsageError, match=r"must be 3"):
        mask_disallowed_stops(logits(2, 3), (1, 2))
    with pytest.raises(UsageError, match=r"0\.2 is a mean of 0\.8"):
        solve_initial_bias(0.2, (1, 2, 3, 4))
    assert solve_initial_bias(0.2, (4,)) == 0.0


def test_draw_uniforms_are_keyed_by_document_and_segment() -> None:
    documents = torch.tensor([5, 2, 9])
    result = draw_uniforms("length", 1, 0, documents, 3, 4)
    assert torch.equal(draw_uniforms("length", 1, 0, documents[[2, 0]], 3, 4), result[[2, 0]])
    assert torch.equal(draw_uniforms("length", 1, 0, documents, 3, 2), result[:, :2])
    others = [draw_uniforms("nested", 1, 0, documents, 3, 4), *(
        draw_uniforms("length", *keys, 4) for keys in ((2, 0, documents, 3), (1, 1, documents, 3), (1, 0, documents, 4))
    )]  # fmt: skip
    assert all(bool((other != result).all()) for other in others)
    assert bool(((result >= 0) & (result < 1)).all())
