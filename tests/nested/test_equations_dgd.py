"""Nested 56 to 60 against their oracles, with gradients."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.nested.optim import dgd_equations as ours
from tests.oracles.compare import agree
from tests.oracles.dgd import MISREAD, ORACLE

o, i, N = 3, 4, 6
LIVE = torch.tensor([True, True, False, True, True, False])
FEW = torch.tensor([True, False, True])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def free(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.clone().requires_grad_() for t in tensors)


ETA = torch.tensor(0.7, dtype=torch.float64)


@pytest.mark.equation("nested-learning", "56")
def test_objective() -> None:
    def of(W: Tensor, W_t: Tensor, X: Tensor, D: Tensor, eta: float, live: Tensor) -> Tensor:
        return ours.objective(W, W_t, X, D, eta, valid=live)

    given = normal(o, i), normal(o, i), normal(N, i), normal(N, o)
    agree(of, ORACLE["56"], MISREAD["56"], *given, 0.7, LIVE)
    sums = lambda W, W_t, X, D, eta, live: ours.objective(W, W_t, X, D, eta, valid=live, reduction="sum")  # noqa: E731
    agree(sums, MISREAD["56"]["a sum over positions"], {}, *given, 0.7, LIVE)
    assert gradcheck(lambda *a: of(*a, LIVE), free(*given, ETA))


@pytest.mark.equation("nested-learning", "57")
@pytest.mark.parametrize("length", [0.3, 2.0])
def test_dgd(length: float) -> None:
    x = normal(i)
    given = normal(o, i), length * x / x.norm(), normal(o)
    agree(ours.dgd, ORACLE["57"], MISREAD["57"], *given, 0.7)
    printed, short = "eta / (1 + eta) at |x| /= 1", "erasing without a step, the shorter version's 28"
    for form, name in (("printed", printed), ("short", short)):
        agree(lambda *a, form=form: ours.dgd(*a, form=form), MISREAD["57"][name], {"57": ORACLE["57"]}, *given, 0.7)
        assert gradcheck(lambda *a, form=form: ours.dgd(*a, form=form), free(*given, ETA))
    assert gradcheck(ours.dgd, free(*given, ETA))


@pytest.mark.equation("nested-learning", "57b")
@pytest.mark.parametrize("live", [LIVE, FEW], ids=["more positions than inputs", "fewer"])
def test_dgd_joint(live: Tensor) -> None:
    given = normal(o, i), normal(len(live), i), normal(len(live), o)

    def of(W: Tensor, X: Tensor, D: Tensor, eta: float, live: Tensor) -> Tensor:
        return ours.dgd_joint(W, X, D, eta, valid=live)

    def by_gram(W: Tensor, X: Tensor, D: Tensor, eta: float, live: Tensor) -> Tensor:
        X, D = X[live], D[live]
        return ours.dgd_gram(W, D.mT @ X / len(X), X.mT @ X / len(X), eta)

    agree(of, ORACLE["57b"], MISREAD["57b"], *given, 0.7, live)
    agree(by_gram, ORACLE["57b"], {}, *given, 0.7, live)
    sums = lambda W, X, D, eta, live: ours.dgd_joint(W, X, D, eta, valid=live, reduction="sum")  # noqa: E731
    agree(sums, MISREAD["57b"]["sums for means"], {}, *given, 0.7, live)
    assert gradcheck(lambda *a: of(*a, live), free(*given, ETA))
    assert gradcheck(lambda *a: by_gram(*a, live), free(*given, ETA))


@pytest.mark.equation("nested-learning", "57c")
def test_dgd_mean() -> None:
    def of(W: Tensor, X: Tensor, D: Tensor, eta: float, live: Tensor) -> Tensor:
        return ours.dgd_mean(W, X, D, eta, valid=live)

    given = normal(o, i), normal(N, i), normal(N, o)
    agree(of, ORACLE["57c"], MISREAD["57c"], *given, 0.7, LIVE)
    assert gradcheck(lambda *a: of(*a, LIVE), free(*given, ETA))


@pytest.mark.equation("nested-learning", "57d")
def test_dgd_sequential() -> None:
    def of(W: Tensor, X: Tensor, D: Tensor, eta: float, live: Tensor) -> Tensor:
        return ours.dgd_sequential(W, X, D, eta, valid=live)

    given = normal(o, i), normal(N, i), normal(N, o)
    agree(of, ORACLE["57d"], MISREAD["57d"], *given, 0.7, LIVE)
    sums = lambda W, X, D, eta, live: ours.dgd_sequential(W, X, D, eta, valid=live, reduction="sum")  # noqa: E731
    agree(sums, MISREAD["57d"]["the whole of eta each time"], {}, *given, 0.7, LIVE)
    assert gradcheck(lambda *a: of(*a, LIVE), free(*given, ETA))


@pytest.mark.equation("nested-learning", "57v")
def test_vector_forms() -> None:
    def of(w: Tensor, x: Tensor, d: Tensor, g: Tensor, G: Tensor, count: Tensor, N: int, eta: float) -> object:
        return (
            ours.dgd_row(w, x, d[0], eta),
            ours.dgd_gain(g, x, d, eta),
            ours.dgd_embedding(G.flip(0), G, count, N, eta),
        )

    count = torch.tensor([2, 0, 3, 1, 0])
    given = normal(i), normal(i), normal(i), normal(i), normal(5, 2)
    agree(of, ORACLE["57v"], MISREAD["57v"], *given, count, 6, 0.7)
    assert gradcheck(lambda *a: of(*a[:-1], count, 6, a[-1]), free(*given, ETA))


@pytest.mark.equation("nested-learning", "59,60")
@pytest.mark.parametrize("value", ["minus_delta", "target"])
def test_ggd(value: str) -> None:
    def of(W: Tensor, x: Tensor, d: Tensor, eta: float, value: str, window: Tensor, weights: Tensor) -> Tensor:
        return ours.ggd(W, x, d, eta, value=value, window=window, weights=weights)

    W, window, weights = normal(o, i), normal(3, o, i), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    given = W, 1.5 * normal(i), normal(o)
    agree(of, ORACLE["59,60"], MISREAD["59,60"], *given, 0.7, value, window, weights)
    own = lambda W, x, d: -d if value == "minus_delta" else W @ x - d  # noqa: E731
    assert torch.equal(ours.ggd(*given, 0.7, value=own), ours.ggd(*given, 0.7, value=value))
    assert gradcheck(lambda *a: of(*a[:3], 0.7, value, a[3], weights), free(*given, window))
    dot = ours.ggd(*given, 0.7, objective="dot", value=own)
    near = lambda w: -(w @ given[1]) @ own(*given) + (w - W).square().sum() / 1.4  # noqa: E731
    (slope,) = torch.autograd.grad(near(dot.requires_grad_()), dot)
    assert slope.abs().max() < 1e-14
