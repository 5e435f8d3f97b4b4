"""Nested Learning 30 to 55 and 75 against their oracles, with gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from laconic.nested.optim import m3_equations
from laconic.nested.optim.m3_equations import M3Hyperparameters, M3Memories
from tests.oracles.compare import agree
from tests.oracles.m3 import MISREAD, ORACLE, newton_schulz, proximal
from tests.reference import gradient_memories as reference
from tests.reference.gradient_memories import MLPGradientMemory

o, i, N = 3, 4, 5
CUBIC = (1.5, -0.5, 0.0)  # gradient descent on |O'O - I|^2 with step 1/8


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def free(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.clone().requires_grad_() for t in tensors)


@pytest.mark.equation("nested-learning", "30,54")
def test_descent() -> None:
    X, D = normal(N, i), normal(N, i)  # square, so that input and error can be exchanged
    agree(reference.descent, ORACLE["30,54"], MISREAD["30,54"], normal(i, i), X, D, 0.3)
    assert gradcheck(partial(reference.descent, step=0.3), free(normal(i, i), X, D))


@pytest.mark.equation("nested-learning", "31,55")
def test_dot_proximal() -> None:
    arguments = normal(o, i), normal(N, i), normal(N, o)
    agree(reference.dot_proximal, ORACLE["31,55"], MISREAD["31,55"], *arguments, 0.3)
    assert gradcheck(partial(reference.dot_proximal, step=0.3), free(*arguments))


@pytest.mark.equation("nested-learning", "33")
def test_momentum() -> None:
    arguments = normal(o, i), normal(o, i), normal(o, i)
    agree(m3_equations.momentum, ORACLE["33"], MISREAD["33"], *arguments, 0.9, 0.3)
    assert gradcheck(partial(m3_equations.momentum, beta=0.9, step=0.3), free(*arguments))
    state = torch.tensor([0.1 * 0.9**n for n in range(99)]).cumsum(0)  # of the weight, by the last 1, 2, ... gradients
    assert [int((state < part).sum()) + 1 for part in (0.5, 0.99)] == [7, 44]


@pytest.mark.equation("nested-learning", "42")
def test_muon() -> None:
    arguments = normal(o, i), normal(o, i), normal(o, i)
    agree(reference.muon, ORACLE["42"], MISREAD["42"], *arguments, 0.9, 0.3)
    mapped = reference.mapped_momentum(arguments[0], m3_equations.momentum(*arguments, 0.9, 0.3)[1])
    assert torch.equal(mapped, reference.muon(*arguments, 0.9, 0.3)[0])
    assert gradcheck(partial(reference.muon, beta=0.9, step=0.3), free(*arguments))


@pytest.mark.equation("nested-learning", "44")
@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (1, 5)])
def test_newton_schulz(shape: tuple[int, int]) -> None:
    m = normal(*shape)
    misread = MISREAD["44"] if min(shape) > 1 else {"four steps": MISREAD["44"]["four steps"]}
    agree(m3_equations.newton_schulz, ORACLE["44"], misread, m)
    agree(partial(m3_equations.newton_schulz, coefficients=CUBIC), MISREAD["44"]["the cubic polynomial"], {}, m)
    both = torch.stack([m, 3 * m])
    agree(m3_equations.newton_schulz, lambda x: torch.stack([newton_schulz(y) for y in x]), {}, both)
    assert gradcheck(m3_equations.newton_schulz, free(m))


def test_the_cubic_step_descends_43_and_the_printed_one_does_not() -> None:
    """Its gradient is 4 O (O'O - I); a step of 1/8 along it is the cubic polynomial."""
    (O,) = free(normal(o, i))
    (grad,) = torch.autograd.grad((O.mT @ O - torch.eye(i)).square().sum(), O)
    assert torch.allclose(grad, 4 * O @ (O.mT @ O - torch.eye(i)), atol=1e-12, rtol=0)
    m = O.detach() / (O.detach().norm() + 1e-7)
    step = m - (4 * m @ (m.mT @ m - torch.eye(i))) / 8
    assert torch.allclose(m3_equations.newton_schulz(O.detach(), steps=1, coefficients=CUBIC), step, atol=1e-12, rtol=0)
    singular = torch.linalg.svdvals(m3_equations.newton_schulz(normal(o, i), steps=40, coefficients=CUBIC))
    assert torch.allclose(singular, torch.ones(o).double(), atol=1e-12, rtol=0)


@pytest.mark.equation("nested-learning", "47")
def test_preconditioned() -> None:
    arguments, P = (normal(i, i), normal(i, i)), normal(i, i)
    misread = {n: w for n, w in MISREAD["47"].items() if n != "P from the right"}
    agree(reference.preconditioned_momentum, ORACLE["47"], misread, *arguments, 0.9, 0.3, P)
    right = lambda m, g, share, step, P: MISREAD["47"]["P from the right"](m, g, share, step, P).T  # noqa: E731
    agree(reference.preconditioned_momentum, ORACLE["47"], {"right": right}, *arguments, 0.9, 0.3, P)
    agree(
        lambda *a: reference.preconditioned_momentum(*a[:-1], lambda g: a[-1] @ g),
        ORACLE["47"],
        {},
        *arguments,
        0.9,
        0.3,
        P,
    )
    agree(lambda *a: reference.preconditioned_momentum(*a[:-1]), MISREAD["47"]["no P"], {}, *arguments, 0.9, 0.3, P)
    assert gradcheck(lambda m, g, P: reference.preconditioned_momentum(m, g, 0.9, 0.3, P), free(*arguments, P))


@pytest.mark.equation("nested-learning", "49")
def test_delta_momentum() -> None:
    def run(m: Tensor, g: Tensor, beta: float, step: float, P: Tensor) -> Tensor:
        return m3_equations.delta_momentum(m, g, beta, 0.0) - step * P @ g

    arguments = normal(o, i), normal(o, i), 0.9, 0.3, normal(o, o)
    agree(run, ORACLE["49"], MISREAD["49"], *arguments)
    plain = m3_equations.delta_momentum(*arguments[:4])
    torch.testing.assert_close(plain, run(*arguments[:4], torch.eye(o).double()))
    printed = reference.delta_momentum_printed
    agree(printed, MISREAD["49"]["g not normalised"], {"unit": ORACLE["49"]}, *arguments)
    for shape in ((o, i), (i, o)):
        m, g, P = normal(*shape), normal(*shape), normal(shape[0], shape[0])
        agree(reference.delta_momentum_proximal, proximal, {"unit": ORACLE["49"]}, m, g, 0.9, 0.3, P)
    for form in (run, printed, reference.delta_momentum_proximal):
        assert gradcheck(
            lambda m, g, P, form=form: form(m, g, 0.9, 0.3, P), free(arguments[0], arguments[1], arguments[4])
        )


def test_delta_momentum_is_stable_where_the_print_is_not() -> None:
    g, m = 2 * normal(o, i), normal(o, i)
    zero = torch.zeros(o, o).double()
    norms = {"print": m, "unit": m, "proximal": m}
    for _ in range(50):
        norms["print"] = reference.delta_momentum_printed(norms["print"], g, 0.9, 0.3, zero)
        norms["unit"] = m3_equations.delta_momentum(norms["unit"], g, 0.9, 0.0)
        norms["proximal"] = reference.delta_momentum_proximal(norms["proximal"], g, 0.9, 0.3, zero)
    assert float(torch.linalg.matrix_norm(g, 2)) ** 2 > 1.9
    assert norms["print"].norm() > 1e3 > 1 > norms["unit"].norm() > norms["proximal"].norm()


@pytest.mark.equation("nested-learning", "50")
@pytest.mark.parametrize("loss", ["align", "ones"])
def test_deep_momentum(loss: Any) -> None:
    def run(W: Tensor, A1: Tensor, A2: Tensor, g: Tensor, share: float, step: float, lr: float, loss: Any) -> Any:
        new, phi = reference.deep_momentum(W, MLPGradientMemory(A1, A2), g, share, step, lr, loss=loss)
        return new, *phi

    arguments = normal(o, i), normal(i, 6), normal(6, i), normal(o, i)
    agree(run, ORACLE["50"], MISREAD["50"], *arguments, 0.9, 0.3, 0.1, loss)
    assert gradcheck(lambda *a: run(*a, 0.9, 0.3, 0.1, loss), free(*arguments))


def test_a_deep_memory_begins_with_nothing_and_moves_against_the_gradient() -> None:
    phi, g = reference.deep_start(i, torch.Generator().manual_seed(0), torch.float64), normal(o, i)
    assert phi.A1.shape == (i, 16)
    assert not phi.A1.any()
    W, _ = reference.deep_momentum(torch.zeros(o, i).double(), phi, g, 0.9, 0.3, 0.1)
    assert (W * g).sum() < 0


@pytest.mark.equation("nested-learning", "51")
def test_feature_momentum() -> None:
    arguments = normal(o, i), normal(o, i)
    agree(reference.feature_momentum, ORACLE["51"], MISREAD["51"], *arguments, 0.9, 0.3)
    mapped = reference.feature_momentum(*arguments, 0.9, 0.3, m3_equations.newton_schulz, lambda g: 2 * g)
    assert torch.allclose(mapped, 0.9 * arguments[0] - 0.6 * newton_schulz(arguments[1]), atol=1e-12, rtol=0)
    assert gradcheck(partial(reference.feature_momentum, beta=0.9, step=0.3), free(*arguments))


@pytest.mark.equation("nested-learning", "52")
def test_mapped_momentum() -> None:
    arguments = normal(o, i), normal(o, i)
    agree(reference.mapped_momentum, ORACLE["52"], MISREAD["52"], *arguments)
    agree(partial(reference.mapped_momentum, matrix_map=lambda m: m), MISREAD["52"]["not mapped"], {}, *arguments)
    assert gradcheck(reference.mapped_momentum, free(*arguments))


def run_steps(W: Tensor, gradients: Tensor, step: Any) -> tuple[Tensor, ...]:
    """Return W after every gradient."""
    W, weights = W.clone(), []
    memories = M3Memories(*([torch.zeros_like(W)] for _ in range(4)))
    for n, g in enumerate(gradients, 1):
        step([W], [g], memories, n)
        weights.append(W.clone())
    return tuple(weights)


def scaled_newton_schulz(m: Tensor, divisor: float) -> Tensor:
    return m3_equations.newton_schulz(m / divisor)


@pytest.mark.medium
@pytest.mark.equation("nested-learning", "75")
@pytest.mark.parametrize("shape", [(3, 4), (4, 2)])
def test_literal(shape: tuple[int, int]) -> None:
    def run(W: Tensor, gradients: Tensor, lr: float, betas: Any, alpha: float, f: int) -> tuple[Tensor, ...]:
        hyperparameters = M3Hyperparameters(betas, alpha, f)

        def step(*arguments: Any) -> None:
            m3_equations.algorithm1(*arguments, lr, hyperparameters, scaled_newton_schulz)

        return run_steps(W, gradients, step)

    arguments = normal(*shape), normal(7, *shape)
    agree(run, ORACLE["75"], MISREAD["75"], *arguments, 0.1, (0.9, 0.99, 0.8), 0.7, 3)


@pytest.mark.medium
@pytest.mark.equation("nested-learning", "75e")
def test_ema() -> None:
    def run(
        W: Tensor, gradients: Tensor, lr: float, betas: Any, alpha: float, f: int, decay: float
    ) -> tuple[Tensor, ...]:
        hyperparameters = M3Hyperparameters(betas, alpha, f)

        def step(*arguments: Any) -> None:
            m3_equations.algorithm1_ema(*arguments, lr, hyperparameters, scaled_newton_schulz, decay)

        return run_steps(W, gradients, step)

    arguments = normal(3, 4), normal(9, 3, 4)
    agree(run, ORACLE["75e"], MISREAD["75e"], *arguments, 0.1, (0.9, 0.99, 0.8), 0.7, 3, 0.2)
