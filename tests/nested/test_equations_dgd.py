"""Nested Learning 56 to 60 against their oracles, with gradients."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.nested.optim import dgd_equations
from tests.oracles.compare import agree
from tests.oracles.dgd import MISREAD, ORACLE
from tests.reference import delta_gradient_descent as reference

o, i, N = 3, 4, 6
VALID = torch.tensor([True, True, False, True, True, False])
FEW = torch.tensor([True, False, True])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def free(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.clone().requires_grad_() for t in tensors)


ETA = torch.tensor(0.7, dtype=torch.float64)


@pytest.mark.equation("nested-learning", "56")
def test_objective() -> None:
    def run(W: Tensor, W_t: Tensor, X: Tensor, D: Tensor, eta: float, valid: Tensor) -> Tensor:
        return reference.objective(W, W_t, X, D, eta, valid=valid)

    arguments = normal(o, i), normal(o, i), normal(N, i), normal(N, o)
    agree(run, ORACLE["56"], MISREAD["56"], *arguments, 0.7, VALID)
    sums = lambda W, W_t, X, D, eta, valid: reference.objective(W, W_t, X, D, eta, valid=valid, reduction="sum")  # noqa: E731
    agree(sums, MISREAD["56"]["a sum over positions"], {}, *arguments, 0.7, VALID)
    assert gradcheck(lambda *a: run(*a, VALID), free(*arguments, ETA))


@pytest.mark.equation("nested-learning", "57")
@pytest.mark.parametrize("length", [0.3, 2.0])
def test_dgd(length: float) -> None:
    x = normal(i)
    arguments = normal(o, i), length * x / x.norm(), normal(o)
    agree(dgd_equations.dgd, ORACLE["57"], MISREAD["57"], *arguments, 0.7)
    printed, short = "eta / (1 + eta) at |x| /= 1", "erasing without a step, the shorter version's 28"
    for form, name in ((reference.dgd_printed, printed), (reference.dgd_short, short)):
        agree(form, MISREAD["57"][name], {"57": ORACLE["57"]}, *arguments, 0.7)
        assert gradcheck(form, free(*arguments, ETA))
    assert gradcheck(dgd_equations.dgd, free(*arguments, ETA))


@pytest.mark.equation("nested-learning", "57b")
@pytest.mark.parametrize("valid", [VALID, FEW], ids=["more positions than inputs", "fewer"])
def test_dgd_joint(valid: Tensor) -> None:
    arguments = normal(o, i), normal(len(valid), i), normal(len(valid), o)

    def run(W: Tensor, X: Tensor, D: Tensor, eta: float, valid: Tensor) -> Tensor:
        return dgd_equations.dgd_joint(W, X, D, eta, valid=valid)

    def by_gram(W: Tensor, X: Tensor, D: Tensor, eta: float, valid: Tensor) -> Tensor:
        X, D = X[valid], D[valid]
        return dgd_equations.dgd_gram(W, D.mT @ X / len(X), X.mT @ X / len(X), eta)

    agree(run, ORACLE["57b"], MISREAD["57b"], *arguments, 0.7, valid)
    agree(by_gram, ORACLE["57b"], {}, *arguments, 0.7, valid)
    sums = lambda W, X, D, eta, valid: dgd_equations.dgd_joint(W, X, D, eta, valid=valid, reduction="sum")  # noqa: E731
    agree(sums, MISREAD["57b"]["sums for means"], {}, *arguments, 0.7, valid)
    assert gradcheck(lambda *a: run(*a, valid), free(*arguments, ETA))
    assert gradcheck(lambda *a: by_gram(*a, valid), free(*arguments, ETA))


@pytest.mark.equation("nested-learning", "57v")
def test_vector_forms() -> None:
    def run(w: Tensor, x: Tensor, d: Tensor, g: Tensor, G: Tensor, count: Tensor, N: int, eta: float) -> object:
        return (
            reference.dgd_row(w, x, d[0], eta),
            reference.dgd_gain(g, x, d, eta),
            dgd_equations.dgd_embedding(G.flip(0), G, count, N, eta),
        )

    count = torch.tensor([2, 0, 3, 1, 0])
    arguments = normal(i), normal(i), normal(i), normal(i), normal(5, 2)
    agree(run, ORACLE["57v"], MISREAD["57v"], *arguments, count, 6, 0.7)
    assert gradcheck(lambda *a: run(*a[:-1], count, 6, a[-1]), free(*arguments, ETA))


@pytest.mark.equation("nested-learning", "59,60")
@pytest.mark.parametrize("value", ["minus_delta", "target"])
def test_ggd(value: str) -> None:
    def run(W: Tensor, x: Tensor, d: Tensor, eta: float, value: str, window: Tensor, weights: Tensor) -> Tensor:
        return reference.ggd(W, x, d, eta, value=value, window=window, weights=weights)

    W, window, weights = normal(o, i), normal(3, o, i), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    arguments = W, 1.5 * normal(i), normal(o)
    agree(run, ORACLE["59,60"], MISREAD["59,60"], *arguments, 0.7, value, window, weights)
    value_of = lambda W, x, d: -d if value == "minus_delta" else W @ x - d  # noqa: E731
    assert torch.equal(reference.ggd(*arguments, 0.7, value=value_of), reference.ggd(*arguments, 0.7, value=value))
    assert gradcheck(lambda *a: run(*a[:3], 0.7, value, a[3], weights), free(*arguments, window))
    dot = reference.ggd(*arguments, 0.7, objective="dot", value=value_of)
    near = lambda w: -(w @ arguments[1]) @ value_of(*arguments) + (w - W).square().sum() / 1.4  # noqa: E731
    (grad,) = torch.autograd.grad(near(dot.requires_grad_()), dot)
    assert grad.abs().max() < 1e-14
