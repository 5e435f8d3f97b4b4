"""Optimizers as memories of gradients: momentum, delta momentum, Muon's orthogonalization, and M3.

Nested Learning arXiv:2512.24695, section 4 and Algorithm 1; the quintic Newton-Schulz iteration is Keller Jordan's.

Symbols: W weight [o, i]; g its gradient; m the memory, a running sum that moves W; beta the factor of m and `step` the
size of a write; NS Newton-Schulz; M1, M2 M3's fast and slow memory, V the sum of squares, f the gradients per slow
update, O2 = NS(M2). Leading dimensions are independent memories. Every memory starts with
zeros.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.errors import UsageError
from laconic.nested.optim.dgd_equations import to_accumulation_dtype

Weight = Float[Tensor, "*B o i"]
Step = float | int | Tensor
ScaledMatrixMap = Callable[[Tensor, float], Tensor]  # maps a matrix, after division by the number
foreach = cast(Any, torch)  # its `_foreach` functions are documented as a beta API, but have no types
QUINTIC = (3.4445, -4.7750, 2.0315)  # brings singular values into [.7, 1.2] in five steps


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
    m: Float[Tensor, "*shape"], *, steps: int = 5, coefficients: tuple[float, float, float] = QUINTIC, eps: float = 1e-7
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


class M3Memories(NamedTuple):
    """Memories of M3 for matrices that have seen equally many gradients, updated in place; V is empty if not used."""

    M1: list[Tensor]
    M2: list[Tensor]
    O2: list[Tensor]
    V: list[Tensor]


@dataclass(frozen=True)
class M3Hyperparameters:
    """The factors of the fast memory, the squares and the slow memory; the weight of O2; f; what is added to √V."""

    betas: tuple[float, float, float] = (0.95, 0.999, 0.9)
    alpha: float = 0.5
    slow_every: int = 10
    eps: float = 1e-8


def algorithm1(
    W: list[Tensor],
    g: list[Tensor],
    memories: M3Memories,
    n: int,
    lr: float,
    hyperparameters: M3Hyperparameters,
    NS: ScaledMatrixMap,
) -> None:
    """Eq. 75: M1 += b1 g, V += b2 g^2, M2 += b3 g; W -= lr (NS(M1) + alpha O2) / (sqrt V + eps); O2 = NS(M2) every f.

    The paper adds the sum of a period's gradients to M2 at its end. O2 is the only reader of M2, so each gradient can
    be added at once. `n` counts the gradients with this one; W and the memories change in place.
    """
    b1, b2, b3 = hyperparameters.betas
    M1, M2, O2, V = memories
    foreach._foreach_add_(M1, g, alpha=b1)
    foreach._foreach_addcmul_(V, g, g, value=b2)
    foreach._foreach_add_(M2, g, alpha=b3)
    for w, m1, o2, v in zip(W, M1, O2, V, strict=True):
        o = NS(m1, 1.0).add(o2, alpha=hyperparameters.alpha)
        w.addcdiv_(o.to(w.dtype), v.sqrt().add_(hyperparameters.eps), value=-lr)
    if n % hyperparameters.slow_every == 0:
        for m2, o2 in zip(M2, O2, strict=True):
            o2.copy_(NS(m2, 1.0))


def algorithm1_ema(
    W: list[Tensor],
    g: list[Tensor],
    memories: M3Memories,
    n: int,
    lr: float,
    hyperparameters: M3Hyperparameters,
    NS: ScaledMatrixMap,
    weight_decay: float = 0.0,
) -> None:
    """Eq. 75e: W' = (1 - lr decay) W - lr .2 sqrt(max(o, i)) (NS(M1^) + alpha NS(M2^)) / (1 + alpha); ours.

    M1 = b1 M1 + (1 - b1) g; every f gradients M2 = b3 M2 + (1 - b3) mean g, from the next step on; a hat corrects the
    bias. W and the memories change in place, as in `algorithm1`; V and b2 are not used.
    """
    b1, _, b3 = hyperparameters.betas
    M1, M2, O2, _ = memories
    alpha, f = hyperparameters.alpha, hyperparameters.slow_every
    foreach._foreach_lerp_(M1, g, 1 - b1)
    if (n - 1) % f == 0:
        foreach._foreach_mul_(M2, b3)
    foreach._foreach_add_(M2, g, alpha=(1 - b3) / f)
    if weight_decay:
        foreach._foreach_mul_(W, 1 - lr * weight_decay)
    for w, m1, o2 in zip(W, M1, O2, strict=True):
        o = NS(m1, 1 - b1**n)
        o = o.add(o2, alpha=alpha) if n > f else o
        w.add_(o, alpha=-lr * 0.2 * math.sqrt(max(w.shape)) / (1 + alpha))
    if n % f == 0:
        for m2, o2 in zip(M2, O2, strict=True):
            o2.copy_(NS(m2, 1 - b3 ** (n // f)))
