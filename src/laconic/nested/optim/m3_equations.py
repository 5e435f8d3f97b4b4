"""Optimizers as memories of gradients: momentum and what the paper makes of it, up to M3, which has two time scales.

NL arXiv:2512.24695, section 4 and Algorithm 1; Muon's orthogonalisation is Keller Jordan's.

Symbols: W weight [o, i]; g its gradient; m the memory, the running sum that moves W; momentum its share that stays and
step the size of a write; P a preconditioner, a matrix [o, o] or a function; NS Newton-Schulz; M1, M2 M3's fast and slow
memory, V the sum of squares, A the gradients since the last slow update, f their number, O2 what NS makes of M2.
Leading dimensions are memories of their own. Every memory begins with zeros.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.errors import UsageError
from laconic.nested.optim.dgd_equations import solve_ridge, to_accumulation_dtype

Weight = Float[Tensor, "*B o i"]
Step = float | int | Tensor
MatrixMap = Callable[[Tensor], Tensor]
Preconditioner = Tensor | MatrixMap | None
Coefficients = Literal["quintic", "cubic"]
POLYNOMIALS: dict[Coefficients, tuple[float, float, float]] = {
    "quintic": (3.4445, -4.7750, 2.0315),  # Keller Jordan's, which reaches singular values of .7 to 1.2 in five steps
    "cubic": (1.5, -0.5, 0.0),  # descends |O'O - I|^2 with step 1/8
}


def descent(W: Weight, X: Float[Tensor, "*B N i"], D: Float[Tensor, "*B N o"], step: Step) -> Weight:
    """Eq. 30,54: W' = W - step D'X, summed over positions: each write puts -delta at x."""
    return W - step * (D.mT @ X)


def dot_proximal(W: Weight, X: Float[Tensor, "*B N i"], D: Float[Tensor, "*B N o"], step: Step) -> Weight:
    """Eq. 31,55: argmin over W' of <W' x, delta> + |W' - W|^2 / (2 step), which is 54."""
    return descent(W, X, D, step)


def momentum(W: Weight, m: Weight, g: Weight, beta: float, step: Step) -> tuple[Weight, Weight]:
    """Eq. 33: m' = momentum m - step g; W' = W + m', with `share` for momentum. Gives W' and m'.

    At .9 the last 7 gradients hold half of the weight, the last 44 hold 99 %.
    """
    m = beta * m - step * g
    return W + m, m


def frobenius_norm(x: Tensor) -> Tensor:
    """|x|_F of every matrix, whose gradient at a matrix of zeros is 0."""
    return x.square().sum((-2, -1), keepdim=True).clamp(min=1e-30).sqrt()


def newton_schulz(
    m: Float[Tensor, "*shape"], *, steps: int = 5, coefficients: Coefficients = "quintic", eps: float = 1e-7
) -> Float[Tensor, "*shape"]:
    """Eq. 44: X_0 = m / (|m|_F + eps); `steps` times X <- a X + b (X X')X + c (X X')^2 X.

    Draws the singular values of m to 1. Runs on the narrower side. Raises `Usage` (2) for what is no matrix.
    """
    if m.ndim < 2:
        raise UsageError(
            f"newton_schulz: a matrix [o, i] is asked, this has shape {list(m.shape)}; vectors go by AdamW"
        )
    a, b, c = POLYNOMIALS[coefficients]
    (x,) = to_accumulation_dtype(m)
    with torch.autocast(m.device.type, enabled=False):
        x = x / (frobenius_norm(x) + eps)
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        for _ in range(steps):
            xx = x @ x.mT
            x = a * x + (b * xx + c * (xx @ xx)) @ x if c else a * x + b * (xx @ x)
    return (x.mT if tall else x).to(m.dtype)


def muon(W: Weight, m: Weight, g: Weight, beta: float, step: Step) -> tuple[Weight, Weight]:
    """Eq. 42: m' as 33; W' = W + NS(m'). Gives W' and m'."""
    _, m = momentum(W, m, g, beta, step)
    return W + newton_schulz(m), m


def precondition(g: Weight, P: Preconditioner) -> Weight:
    """P(g): g itself, P g, or what a function makes of it."""
    if P is None:
        return g
    return P @ g if isinstance(P, Tensor) else P(g)


def preconditioned_momentum(m: Weight, g: Weight, beta: float, step: Step, P: Preconditioner = None) -> Weight:
    """Eq. 47: m' = momentum m - step P(g), with `share` for momentum."""
    return beta * m - step * precondition(g, P)


def delta_momentum(
    m: Weight,
    g: Weight,
    beta: float,
    step: Step,
    P: Preconditioner = None,
    *,
    normalize: Literal["frobenius", "none"] = "frobenius",
    form: Literal["gradient", "proximal"] = "gradient",
    eps: float = 1e-8,
) -> Weight:
    """Eq. 49: m' = m (momentum I - g'g) - step P(g), with g / |g|_F in the erasing, and `share` for momentum.

    `normalise="none"` is the print, unstable once |g|_2^2 > 1 + momentum. `form="proximal"` is the minimiser of
    1/2 |m' g' + P|^2 + |m' - momentum m|^2 / (2 step), m' = (momentum m - step P g)(I + step g'g)^-1: it has g as it
    is, and never expands. Raises `NonFinite` (65) as `dgd.resolved` does.
    """
    if form == "proximal":
        return solve_ridge(beta * m - step * precondition(g, P), g, step)
    unit = g / (frobenius_norm(g) + eps) if normalize == "frobenius" else g
    return beta * m - (m @ unit.mT) @ unit - step * precondition(g, P)


class MLPGradientMemory(NamedTuple):
    """The parameters of a memory m(u) = A1 tanh(A2 u), which reads the rows of a gradient."""

    A1: Float[Tensor, "i h"]
    A2: Float[Tensor, "h i"]


def rms(x: Tensor, eps: float) -> Tensor:
    """Root mean square over a matrix."""
    return x.square().mean((-2, -1), keepdim=True).sqrt() + eps


def deep_start(i: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> MLPGradientMemory:
    """A1 = 0, A2 normal with std i^-1/2; hidden width 4 i, at most 256. The paper says nothing of either."""
    h = min(4 * i, 256)
    A2 = torch.randn(h, i, generator=generator, dtype=dtype, device=generator.device) / math.sqrt(i)
    return MLPGradientMemory(A2.new_zeros(i, h), A2)


def deep_momentum(
    W: Float[Tensor, "o i"],
    phi: MLPGradientMemory,
    g: Float[Tensor, "o i"],
    beta: float,
    step: Step,
    lr: Step,
    *,
    loss: Literal["align", "ones"] = "align",
    eps: float = 1e-8,
) -> tuple[Float[Tensor, "o i"], MLPGradientMemory]:
    """Eq. 50: phi' = momentum phi - step grad L2(m_phi; u); W' = W + lr m_phi'(u) / rms. Experimental. Gives W', phi'.

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
    """g |g|, one of the feature maps of 51."""
    return g * g.abs()


def feature_momentum(
    m: Weight, g: Weight, beta: float, step: Step, feature: MatrixMap = signed_square, P: Preconditioner = None
) -> Weight:
    """Eq. 51: m' = momentum m - step P(phi(g)), phi `signed_square`, `newton_schulz` or any other `feature`."""
    return beta * m - step * precondition(feature(g), P)


def mapped_momentum(W: Weight, m: Weight, matrix_map: MatrixMap = newton_schulz) -> Weight:
    """Eq. 52: W' = W + sigma(m'), sigma `newton_schulz` or any other `map`."""
    return W + matrix_map(m)


@dataclass(frozen=True)
class M3State:
    """What M3 keeps of one matrix; `n` counts its gradients. V is None where nothing asks for it."""

    n: int
    M1: Tensor
    M2: Tensor
    A: Tensor
    O2: Tensor
    V: Tensor | None = None


@dataclass(frozen=True)
class M3Hyperparameters:
    """M3's numbers: the shares of fast memory, squares and slow memory, the weight of O2, gradients a slow update."""

    betas: tuple[float, float, float] = (0.95, 0.999, 0.9)
    alpha: float = 0.5
    slow_every: int = 10
    eps: float = 1e-8


def algorithm1(
    W: Weight, g: Weight, state: M3State, lr: float | int, hyperparameters: M3Hyperparameters, NS: MatrixMap
) -> tuple[Weight, M3State]:
    """Eq. 75: M1 += b1 g, V += b2 g^2, A += g; W -= lr (NS(M1) + alpha O2) / (sqrt V + eps); then slow, if f divides n.

    Slow: M2 += b3 A, O2 = NS(M2), A = 0; so O2 holds f gradients of each earlier period. Gives W' and the memory.
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
    bias. `second` divides the step by the root of the mean square V^, which ties it to the size of the loss again.
    """
    (b1, b2, b3), n = hyperparameters.betas, state.n + 1
    M1, A = b1 * state.M1 + (1 - b1) * g, state.A + g
    o = (NS(M1 / (1 - b1**n)) + hyperparameters.alpha * state.O2) / (1 + hyperparameters.alpha)
    state = replace(state, n=n, M1=M1, A=A)
    if second:
        V = (1 - b2) * g.square() + (0 if state.V is None else b2 * state.V)
        o = o / ((V / (1 - b2**n)).sqrt() + hyperparameters.eps)
        state = replace(state, V=V)
    if n % hyperparameters.slow_every == 0:
        M2 = b3 * state.M2 + (1 - b3) * A / hyperparameters.slow_every
        hat = M2 / (1 - b3 ** (n // hyperparameters.slow_every))
        state = replace(state, M2=M2, O2=NS(hat), A=torch.zeros_like(A))
    return (1 - lr * decay) * W - lr * 0.2 * math.sqrt(max(W.shape[-2:])) * o, state
