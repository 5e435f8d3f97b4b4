"""Optimizers as memories that only comparisons need: Nested Learning arXiv:2512.24695 (30 to 52).

Symbols as in `laconic.nested.optim.m3_equations`; P a preconditioner, a matrix [o, o] or a function.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from laconic.nested.optim.dgd_equations import solve_ridge
from laconic.nested.optim.m3_equations import momentum, newton_schulz

Preconditioner = Tensor | Callable[[Tensor], Tensor] | None


def descent(W: Tensor, X: Tensor, D: Tensor, step: float) -> Tensor:
    """Eq. 30,54: W' = W - step D'X, summed over positions: each write puts -delta at x."""
    return W - step * (D.mT @ X)


def dot_proximal(W: Tensor, X: Tensor, D: Tensor, step: float) -> Tensor:
    """Eq. 31,55: argmin over W' of <W' x, delta> + |W' - W|^2 / (2 step), which is 54."""
    return descent(W, X, D, step)


def muon(W: Tensor, m: Tensor, g: Tensor, beta: float, step: float) -> tuple[Tensor, Tensor]:
    """Eq. 42: m' as 33; W' = W + NS(m'). Returns W' and m'."""
    _, m = momentum(W, m, g, beta, step)
    return W + newton_schulz(m), m


def precondition(g: Tensor, P: Preconditioner) -> Tensor:
    """Return P(g): g itself, P g, or a function of it."""
    if P is None:
        return g
    return P @ g if isinstance(P, Tensor) else P(g)


def preconditioned_momentum(m: Tensor, g: Tensor, beta: float, step: float, P: Preconditioner = None) -> Tensor:
    """Eq. 47: m' = beta m - step P(g)."""
    return beta * m - step * precondition(g, P)


def delta_momentum_printed(m: Tensor, g: Tensor, beta: float, step: float, P: Preconditioner = None) -> Tensor:
    """Return the paper's form of Eq. 49, which erases with g itself."""
    return beta * m - (m @ g.mT) @ g - step * precondition(g, P)


def delta_momentum_proximal(m: Tensor, g: Tensor, beta: float, step: float, P: Preconditioner = None) -> Tensor:
    """Return the minimiser of 1/2 |m' g' + P|^2 + |m' - beta m|^2 / (2 step), which never expands."""
    return solve_ridge(beta * m - step * precondition(g, P), g, step)


class MLPGradientMemory(NamedTuple):
    """Parameters of a memory m(u) = A1 tanh(A2 u), which reads the rows of a gradient."""

    A1: Tensor
    A2: Tensor


def rms(x: Tensor, eps: float) -> Tensor:
    """Return the root mean square over a matrix."""
    return x.square().mean((-2, -1), keepdim=True).sqrt() + eps


def deep_start(i: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> MLPGradientMemory:
    """Return A1 = 0 and A2 normal with std i^-1/2; hidden width 4 i, at most 256. The paper gives neither."""
    h = min(4 * i, 256)
    A2 = torch.randn(h, i, generator=generator, dtype=dtype, device=generator.device) / math.sqrt(i)
    return MLPGradientMemory(A2.new_zeros(i, h), A2)


def deep_momentum(
    W: Tensor,
    phi: MLPGradientMemory,
    g: Tensor,
    beta: float,
    step: float,
    lr: float,
    *,
    loss: Literal["align", "ones"] = "align",
    eps: float = 1e-8,
) -> tuple[Tensor, MLPGradientMemory]:
    """Eq. 50: phi' = beta phi - step grad L2(m_phi; u); W' = W + lr m_phi'(u) / rms. Returns W' and phi'.

    u are the rows of g / rms(g); L2 is <m(u), u> / o ("align") or <m(u), 1> ("ones", the paper's example).
    """
    u = g / rms(g, eps)
    hidden = torch.tanh(u @ phi.A2.mT)
    t = u / len(u) if loss == "align" else torch.ones_like(u)
    back = (t @ phi.A1) * (1 - hidden.square())
    phi = MLPGradientMemory(beta * phi.A1 - step * (t.mT @ hidden), beta * phi.A2 - step * (back.mT @ u))
    out = torch.tanh(u @ phi.A2.mT) @ phi.A1.mT
    return W + lr * out / rms(out, eps), phi


def signed_square(g: Tensor) -> Tensor:
    """Return g |g|, one of the feature maps of 51."""
    return g * g.abs()


def feature_momentum(
    m: Tensor,
    g: Tensor,
    beta: float,
    step: float,
    feature: Callable[[Tensor], Tensor] = signed_square,
    P: Preconditioner = None,
) -> Tensor:
    """Eq. 51: m' = beta m - step P(phi(g))."""
    return beta * m - step * precondition(feature(g), P)


def mapped_momentum(W: Tensor, m: Tensor, matrix_map: Callable[[Tensor], Tensor] = newton_schulz) -> Tensor:
    """Eq. 52: W' = W + sigma(m')."""
    return W + matrix_map(m)
