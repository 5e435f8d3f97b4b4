"""Delta gradient descent: a step of a linear map that goes with the error, and unlearns what lies along the input.

NL arXiv:2512.24695, section 4.5. `record` and `plain` make a model's maps ready for the optimizer `laconic.DGD`.

Symbols: W weight [o, i]; x input [i] and delta the gradient of the loss at y = W x [o]; X, D their rows over N
positions; G = D'X/N and A = X'X/N, ' for transposed; u what W x is drawn to, -delta in the paper; eta the step, and
eta' what is left of it once |x| is known. Leading dimensions are memories of their own. Sums are taken in float32 or
wider. `live` says which positions count: the others neither write nor erase. `erase` is the weight of the erasing, 1 in
the paper.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.errors import NonFiniteError, UsageError
from laconic.models.attention import accumulation_dtype
from laconic.nested.optim.input_recording import record_inputs, stop_recording

__all__ = [
    "dgd", "dgd_embedding", "dgd_gain", "dgd_gram", "dgd_joint", "dgd_mean", "dgd_row", "dgd_sequential", "ggd",
    "objective", "stop_recording", "record_inputs", "solve_ridge",
]  # fmt: skip

Step = float | int | Tensor  # in the test run a float takes no int
Reduction = Literal["mean", "sum"]
Form = Literal["minimiser", "printed", "short"]
Weight = Float[Tensor, "*B o i"]
ValidMask = Bool[Tensor, "*B N"]


def to_accumulation_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each in the type in which sums are taken."""
    return tuple(t.to(accumulation_dtype(t.dtype)) for t in tensors)


def mask_and_count(X: Tensor, D: Tensor, valid: Tensor | None, reduction: Reduction) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that are not live as zeros, and what sums are divided by: the live rows, at least 1, or 1 for sums."""
    x, d = to_accumulation_dtype(X, D)
    if valid is not None:
        x, d = x * valid[..., None], d * valid[..., None]
    if reduction == "sum":
        return x, d, x.new_ones(())
    return x, d, x.new_tensor(x.shape[-2]) if valid is None else valid.sum(-1).clamp(min=1).to(x.dtype)[..., None, None]


def objective(
    W: Weight,
    W_t: Weight,
    X: Float[Tensor, "*B N i"],
    D: Float[Tensor, "*B N o"],
    eta: Step,
    *,
    valid: ValidMask | None = None,
    reduction: Reduction = "mean",
) -> Float[Tensor, "*B"]:
    """Eq. 56: mean over n of 1/2 |W x_n + delta_n|^2, or their sum, + |W - W_t|^2 / (2 eta)."""
    x, d, N = mask_and_count(X, D, valid, reduction)
    near = (W - W_t).square().sum((-2, -1)) / (2 * eta)
    return ((x @ W.to(x.dtype).mT + d).square() / N).sum((-2, -1)) / 2 + near


def effective_step(x: Float[Tensor, "*rows i"], eta: Step, erase: float = 1.0) -> Float[Tensor, "*rows"]:
    """eta' = eta / (1 + erase eta |x|^2)."""
    return eta / (1 + erase * eta * x.square().sum(-1))


def dgd(
    W: Weight,
    x: Float[Tensor, "*B i"],
    delta: Float[Tensor, "*B o"],
    eta: Step,
    *,
    form: Form = "minimiser",
    erase: float = 1.0,
) -> Weight:
    """Eq. 57: W' = W - eta' (W x + delta) x', eta' = eta / (1 + eta |x|^2), which is the minimiser of 56 for any |x|.

    "printed" is the paper's eta' = eta / (1 + eta), which holds at |x| = 1 alone; "short" the shorter version's step,
    W (I - x x') - eta delta x'. Both diverge for long inputs and stand here for comparison.
    """
    w, x, delta = to_accumulation_dtype(W, x, delta)
    with torch.autocast(W.device.type, enabled=False):
        said = (w @ x[..., None])[..., 0]
        if form == "short":
            moved = said + eta * delta
        else:
            by = effective_step(x, eta, erase)[..., None] if form == "minimiser" else eta / (1 + eta)
            moved = by * (erase * said + delta)
        return (w - moved[..., None] * x[..., None, :]).to(W.dtype)


def solve_ridge(R: Weight, X: Float[Tensor, "*B N i"], c: Step) -> Weight:
    """R (I + c X'X)^-1 for c >= 0, by Cholesky on the smaller of [i, i] and [N, N].

    Raises `NonFinite` (65) where the matrix has no factor: something in it is not finite, or c is beyond float32.
    """
    if X.shape[-1] <= X.shape[-2]:
        return right_divide(R, c * (X.mT @ X))
    return R - right_divide(R @ X.mT, c * (X @ X.mT)) @ (c * X)


def right_divide(R: Float[Tensor, "*B o n"], A: Float[Tensor, "*B n n"]) -> Float[Tensor, "*B o n"]:
    """R (I + A)^-1 of a symmetric A without negative eigenvalues."""
    grown = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    factor, bad = cast("tuple[Tensor, Tensor]", cast(Any, torch.linalg).cholesky_ex(grown))
    if bad.any():
        raise NonFiniteError("dgd: I + eta A has no Cholesky factor: an input is not finite, or eta is beyond float32")
    return torch.cholesky_solve(R.mT, factor).mT


def dgd_joint(
    W: Weight,
    X: Float[Tensor, "*B N i"],
    D: Float[Tensor, "*B N o"],
    eta: Step,
    *,
    valid: ValidMask | None = None,
    reduction: Reduction = "mean",
    erase: float = 1.0,
) -> Weight:
    """Eq. 57b: W' = (W - eta G)(I + eta A)^-1, the minimiser of 56 over all N positions, whatever their order.

    `reduce="sum"` has N = 1 in G and A. Raises `NonFinite` (65) as `resolved` does.
    """
    x, d, N = mask_and_count(X, D, valid, reduction)
    with torch.autocast(W.device.type, enabled=False):
        return solve_ridge(W.to(x.dtype) - eta * (d.mT @ x) / N, x, erase * eta / N).to(W.dtype)


def dgd_gram(W: Weight, G: Weight, A: Float[Tensor, "*B i i"], eta: Step, *, erase: float = 1.0) -> Weight:
    """Eq. 57b: the same where only G and A are known; 57 takes no more than these of its N positions."""
    w, g, a = to_accumulation_dtype(W, G, A)
    with torch.autocast(W.device.type, enabled=False):
        return right_divide(w - eta * g, erase * eta * a).to(W.dtype)


def dgd_mean(
    W: Weight,
    X: Float[Tensor, "*B N i"],
    D: Float[Tensor, "*B N o"],
    eta: Step,
    *,
    valid: ValidMask | None = None,
    erase: float = 1.0,
) -> Weight:
    """Eq. 57c: W' = W - 1/N sum over n of eta'_n (W x_n + delta_n) x_n', the mean of the steps each would make."""
    x, d, N = mask_and_count(X, D, valid, "mean")
    with torch.autocast(W.device.type, enabled=False):
        w = W.to(x.dtype)
        moved = effective_step(x, eta, erase)[..., None] * (erase * (x @ w.mT) + d)
        return (w - moved.mT @ x / N).to(W.dtype)


def dgd_sequential(
    W: Weight,
    X: Float[Tensor, "*B N i"],
    D: Float[Tensor, "*B N o"],
    eta: Step,
    *,
    valid: ValidMask | None = None,
    reduction: Reduction = "mean",
    erase: float = 1.0,
) -> Weight:
    """Eq. 57d: 57 by eta / N for each n in order, every delta_n as it was at the first W; by eta for `reduce="sum"`.

    So its step is that of 57b and 57c to first order in eta.
    """
    x, d, N = mask_and_count(X, D, valid, reduction)
    w, by = W.to(x.dtype), (eta / N).reshape(N.shape[:-2])
    for x_n, delta_n in zip(x.unbind(-2), d.unbind(-2), strict=True):
        w = dgd(w, x_n, delta_n, by, erase=erase)
    return w.to(W.dtype)


def dgd_row(
    w: Float[Tensor, "*B i"], x: Float[Tensor, "*B i"], delta: Float[Tensor, "*B"], eta: Step
) -> Float[Tensor, "*B i"]:
    """Eq. 57v: one row, w' = w - eta' (w . x + delta) x."""
    by = effective_step(x, eta) * ((w * x).sum(-1) + delta)
    return w - by[..., None] * x


def dgd_gain(
    gamma: Float[Tensor, "*B i"], x: Float[Tensor, "*B i"], delta: Float[Tensor, "*B i"], eta: Step
) -> Float[Tensor, "*B i"]:
    """Eq. 57v: a gain y = gamma x is a diagonal: gamma_j' = gamma_j - eta'_j (gamma_j x_j + delta_j) x_j."""
    return gamma - eta / (1 + eta * x.square()) * (gamma * x + delta) * x


def dgd_embedding(
    e: Float[Tensor, "V D"],
    G: Float[Tensor, "V D"],
    count: Int[Tensor, " V"] | Float[Tensor, " V"],
    N: Step,
    eta: Step,
    *,
    erase: float = 1.0,
) -> Float[Tensor, "V D"]:
    """Eq. 57v: a row met count_j times in N: e_j' = (e_j - eta G_j) / (1 + eta count_j / N); its input is one-hot."""
    return (e - eta * G) / (1 + erase * eta * count.to(e.dtype) / N)[:, None]


ValueRule = Literal["minus_delta", "target"] | Callable[[Tensor, Tensor, Tensor], Tensor]


def ggd(
    W: Weight,
    x: Float[Tensor, "*B i"],
    delta: Float[Tensor, "*B o"],
    eta: Step,
    *,
    objective: Literal["l2", "dot"] = "l2",
    value: ValueRule = "minus_delta",
    window: Float[Tensor, "c *B o i"] | None = None,
    weights: Float[Tensor, " c"] | None = None,
) -> Weight:
    """Eq. 59,60: argmin over W of L(W x, u) + sum over i of w_i |W - W_i|^2 / (2 eta).

    L is 1/2 |W x - u|^2 ("l2") or -W x . u ("dot"); u is -delta, or W x - delta ("target": nothing is erased), or what
    `value` makes of W, x and delta. `window` are the last c weights and `weights` their w_i. Raises `Usage` (2) if
    those do not sum to 1.
    """
    near = W
    if window is not None:
        weights = window.new_full((len(window),), 1 / len(window)) if weights is None else weights
        if abs(float(weights.detach().sum()) - 1) > 1e-6:
            raise UsageError(
                f"ggd: weights sum to {float(weights.detach().sum()):g}; w_i are shares of the window, sum 1"
            )
        near = (weights.reshape(-1, *[1] * W.ndim) * window).sum(0)
    if value == "minus_delta":
        u = -delta
    elif value == "target":
        u = (W @ x[..., None])[..., 0] - delta
    elif callable(value):
        u = value(W, x, delta)
    else:
        raise UsageError(f'ggd: value {value!r}; there are "minus_delta", "target", or a function of W, x and delta')
    if objective == "dot":
        return near + eta * u[..., None] * x[..., None, :]
    return dgd(near, x, -u, eta)
