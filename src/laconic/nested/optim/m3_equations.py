"""Optimizers as memories of gradients: momentum, delta momentum, Muon's orthogonalization, and M3.

Nested Learning arXiv:2512.24695, section 4 and Algorithm 1; the quintic Newton-Schulz iteration is Keller Jordan's.

Symbols: W weight [o, i]; g its gradient; m the memory, a running sum that moves W; beta the factor of m and `step` the
size of a write; NS Newton-Schulz; M1, M2 M3's fast and slow memory, V the sum of squares, A the gradients since the
last slow update, f their number, O2 = NS(M2). Leading dimensions are independent memories. Every memory starts with
zeros.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.errors import UsageError
from laconic.nested.optim.dgd_equations import to_accumulation_dtype

Weight = Float[Tensor, "*B o i"]
Step = float | int | Tensor
MatrixMap = Callable[[Tensor], Tensor]
QUINTIC = (3.4445, -4.7750, 2.0315)  # brings singular values into [.7, 1.2] in five steps
CUBIC = (1.5, -0.5, 0.0)  # gradient descent on |O'O - I|^2 with step 1/8


def momentum(W: Weight, m: Weight, g: Weight, beta: float, step: Step) -> tuple[Weight, Weight]:
    """Eq. 33: m' = beta m - step g; W' = W + m'. Returns W' and m'.

    With beta = .9, the last 7 gradients have half of the weight and the last 44 have 99 %.
    """
    m = beta * m - step * g
    return W + m, m


def frobenius_norm(x: Tensor) -> Tensor:
    """Return |x|_F of every matrix, with gradient 0 at 0."""
    return x.square().sum((-2, -1), keepdim=True).clamp(min=1e-30).sqrt()


def newton_schulz(
    m: Float[Tensor, "*shape"],
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = QUINTIC,
    eps: float = 1e-7,
) -> Float[Tensor, "*shape"]:
    """Eq. 44: X_0 = m / (|m|_F + eps); `steps` times X <- a X + b (X X')X + c (X X')^2 X.

    Moves the singular values of m towards 1. It runs on the narrower side. Raises `UsageError` for a vector.
    """
    if m.ndim < 2:
        raise UsageError(f"newton_schulz: expected a matrix [o, i], got shape {list(m.shape)}; use AdamW for vectors")
    a, b, c = coefficients
    (x,) = to_accumulation_dtype(m)
    with torch.autocast(m.device.type, enabled=False):
        x = x / (frobenius_norm(x) + eps)
        is_tall = x.shape[-2] > x.shape[-1]
        x = x.mT if is_tall else x
        for _ in range(steps):
            xx = x @ x.mT
            x = a * x + (b * xx + c * (xx @ xx)) @ x if c else a * x + b * (xx @ x)
    return (x.mT if is_tall else x).to(m.dtype)


def delta_momentum(m: Weight, g: Weight, beta: float, step: Step, *, eps: float = 1e-8) -> Weight:
    """Eq. 49: m' = m (beta I - ĝ'ĝ) - step g with ĝ = g / |g|_F.

    The paper erases with g itself, which is unstable once |g|_2^2 > 1 + beta.
    """
    unit = g / (frobenius_norm(g) + eps)
    return beta * m - (m @ unit.mT) @ unit - step * g


@dataclass(frozen=True)
class M3State:
    """State of M3 for one matrix; `n` counts its gradients, V is None if it is not used."""

    n: int
    M1: Tensor
    M2: Tensor
    A: Tensor
    O2: Tensor
    V: Tensor | None = None


@dataclass(frozen=True)
class M3Hyperparameters:
    """Hyperparameters of M3.

    Attributes:
        betas: factors of the fast memory, the squares and the slow memory.
        alpha: weight of O2.
        slow_every: gradients per slow update.
        eps: added to the root of the squares.
    """

    betas: tuple[float, float, float] = (0.95, 0.999, 0.9)
    alpha: float = 0.5
    slow_every: int = 10
    eps: float = 1e-8


def algorithm1(
    W: Weight, g: Weight, state: M3State, lr: float | int, hyperparameters: M3Hyperparameters, NS: MatrixMap
) -> tuple[Weight, M3State]:
    """Eq. 75: M1 += b1 g, V += b2 g^2, A += g; W -= lr (NS(M1) + alpha O2) / (sqrt V + eps); then slow, if f divides n.

    Slow: M2 += b3 A, O2 = NS(M2), A = 0; so O2 contains the gradients of earlier periods. Returns W' and the state.
    """
    (b1, b2, b3), n = hyperparameters.betas, state.n + 1
    M1, A = state.M1 + b1 * g, state.A + g
    V = b2 * g.square() + (0 if state.V is None else state.V)
    w = W - lr * (NS(M1) + hyperparameters.alpha * state.O2) / (V.sqrt() + hyperparameters.eps)
    state = replace(state, n=n, M1=M1, V=V, A=A)
    if n % hyperparameters.slow_every == 0:
        M2 = state.M2 + b3 * A
        state = replace(state, M2=M2, O2=NS(M2), A=torch.zeros_like(A))
    return w, state


def algorithm1_ema(
    W: Weight,
    g: Weight,
    state: M3State,
    lr: float | int,
    hyperparameters: M3Hyperparameters,
    NS: MatrixMap,
    decay: float = 0.0,
    second: bool = False,
) -> tuple[Weight, M3State]:
    """Eq. 75e: W' = (1 - lr decay) W - lr .2 sqrt(max(o, i)) (NS(M1^) + alpha NS(M2^)) / (1 + alpha); ours.

    M1 = b1 M1 + (1 - b1) g; every f gradients M2 = b3 M2 + (1 - b3) A / f, from the next step on; a hat corrects the
    bias. `second` divides the step by the root of the mean square V^, which ties it to the scale of the loss again.
    """
    (b1, b2, b3), n, f = hyperparameters.betas, state.n + 1, hyperparameters.slow_every
    M1, A = b1 * state.M1 + (1 - b1) * g, state.A + g
    o = (NS(M1 / (1 - b1**n)) + hyperparameters.alpha * state.O2) / (1 + hyperparameters.alpha)
    state = replace(state, n=n, M1=M1, A=A)
    if second:
        V = (1 - b2) * g.square() + (0 if state.V is None else b2 * state.V)
        o = o / ((V / (1 - b2**n)).sqrt() + hyperparameters.eps)
        state = replace(state, V=V)
    if n % f == 0:
        M2 = b3 * state.M2 + (1 - b3) * A / f
        state = replace(state, M2=M2, O2=NS(M2 / (1 - b3 ** (n // f))), A=torch.zeros_like(A))
    return (1 - lr * decay) * W - lr * 0.2 * math.sqrt(max(W.shape[-2:])) * o, state
