"""KaVa 1a to 3a against their oracles: selection of chain tokens."""

import pytest
import torch
from torch import Tensor

from laconic.latent.rkv import answer_logits, gather_selected, importance, redundancy, score, select_top_m
from tests import tolerances
from tests.oracles.compare import agree, distance
from tests.oracles.rkv import MISREAD, ORACLE

B, H, G, E, Nq, Nc, Na = 3, 4, 2, 4, 2, 5, 3
CHAIN_MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [False] * 5])
ROWS = torch.tensor([[True] * 3, [False, True, True], [True, False, False]])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.equation("kava", "1a")
def test_answer_logits_equation() -> None:
    agree(answer_logits, ORACLE["1a"], MISREAD["1a"], normal(B, H, Na, E), normal(B, G, Nc, E), 0.37)


@pytest.mark.equation("kava", "1")
def test_importance_equation() -> None:
    def of(q: Tensor, k: Tensor, scale: float, start: int, mask: Tensor, rows: Tensor) -> Tensor:
        return importance(answer_logits(q, k[:, :, start : start + Nc], scale), mask, rows)

    q, k = 2 * normal(B, H, Na, E), normal(B, G, Nq + Nc + Na, E)
    agree(of, ORACLE["1"], MISREAD["1"], q, k, 0.6, Nq, CHAIN_MASK, ROWS)


@pytest.mark.equation("kava", "2")
def test_redundancy_equation() -> None:
    k, v = normal(B, G, Nc, E), normal(B, G, Nc, E)
    agree(lambda k, mask, v: redundancy(k, mask), ORACLE["2"], MISREAD["2"], 3 * k, CHAIN_MASK, v)


@pytest.mark.equation("kava", "3")
@pytest.mark.parametrize("lam", [0.1, 0.7])
def test_score_equation(lam: float) -> None:
    I, R = normal(B, G, Nc).softmax(-1), normal(B, G, Nc).softmax(-1)
    agree(score, ORACLE["3"], MISREAD["3"], I, R, lam)


@pytest.mark.equation("kava", "3a")
@pytest.mark.parametrize("M", [1, 3, 7])
def test_select_top_m_equation(M: int) -> None:
    S = normal(2, B, G, Nc)
    S[0, 0, 0, 3] = S[0, 0, 0, 1] = S[0, 0, 0].max() + 1  # the best two are equal
    S[0, 1] -= 3  # and below 0, so that a pad's 0 would win

    def of(S: Tensor, mask: Tensor, M: int) -> tuple[Tensor, ...]:
        selected = [select_top_m(layer, mask, M) for layer in S]
        return torch.stack([f.index for f in selected]), torch.stack([f.valid for f in selected])

    indistinguishable = {
        1: {"as many slots as the longest chain", "order of score for time"},
        3: {"as many slots as the longest chain"},
    }
    chosen = {
        7: {"the lowest scores", "ties to the later column", "one layer chosen for all", "one head chosen for all"}
    }
    blind = indistinguishable.get(M, set()) | chosen.get(M, set()) | ({"ties to the later column"} if M > 1 else set())
    misread = {name: wrong for name, wrong in MISREAD["3a"].items() if name not in blind}
    agree(lambda *a: tuple(x.double() for x in of(*a)), lambda *a: tuple(x.double() for x in ORACLE["3a"](*a)),
          {n: lambda *a, w=w: tuple(x.double() for x in w(*a)) for n, w in misread.items()},
          S, CHAIN_MASK, M)  # fmt: skip


def test_gather_selected_pads_with_zeros() -> None:
    x, S = normal(B, G, Nc, E), normal(B, G, Nc)
    columns = select_top_m(S, CHAIN_MASK, 4)
    got = gather_selected(x, columns)
    for b in range(B):
        for g in range(G):
            for m in range(4):
                expected = (
                    x[b, g, columns.index[b, g, m]] if columns.valid[b, g, m] else torch.zeros(E, dtype=torch.float64)
                )
                assert torch.equal(got[b, g, m], expected)


def test_rkv_worked_example() -> None:
    """Section 4.1 of the specification: keys (1,0), (1,0), (0,1), logits 0, ln 2, ln 5."""
    k = torch.tensor([[[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]], dtype=torch.float64)
    mask, rows = torch.ones(1, 3).bool(), torch.ones(1, 1).bool()
    R, a = redundancy(k, mask), torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).log().reshape(1, 1, 1, 3)
    I = importance(a, mask, rows)
    S = score(I, R, 0.1)
    for got, expected in ((R, (0.2945, 0.2945, 0.4110)), (I, (0.125, 0.25, 0.625)), (S, (0.2775, 0.2900, 0.4324))):
        assert [round(x, 4) for x in got.flatten().tolist()] == list(expected)
    assert select_top_m(S, mask, 2).index.flatten().tolist() == [1, 2]


def test_redundancy_with_the_diagonal_is_equal() -> None:
    """The similarity to itself adds the same to every column, which a softmax ignores."""
    k = normal(B, G, Nc, E)
    unit = k / k.norm(dim=-1, keepdim=True)
    similar = unit @ unit.mT * CHAIN_MASK[:, None, None]
    r = (-similar.sum(-1) / CHAIN_MASK.sum(1).clamp(min=1)[:, None, None]).masked_fill(~CHAIN_MASK[:, None], -torch.inf)
    expected = r.softmax(-1).nan_to_num(0.0)
    assert distance(redundancy(k, CHAIN_MASK), expected) < tolerances.FLOAT32  # 1e-8 is added to the norm
