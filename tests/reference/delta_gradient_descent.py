"""Forms of delta gradient descent that only comparisons need: Nested Learning arXiv:2512.24695 (56 to 60)."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from laconic.nested.optim.dgd_equations import Reduction, Scalar, dgd, mask_and_count

Value = Literal["minus_delta", "target"] | Callable[[Tensor, Tensor, Tensor], Tensor]


def objective(
    W: Tensor, W_t: Tensor, X: Tensor, D: Tensor, eta: Scalar, *, valid: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:  # fmt: skip
    """Eq. 56: mean over n of 1/2 |W x_n + delta_n|^2, or their sum, + |W - W_t|^2 / (2 eta)."""
    x, d, N = mask_and_count(X, D, valid, reduction)
    distance = (W - W_t).square().sum((-2, -1)) / (2 * eta)
    return ((x @ W.to(x.dtype).mT + d).square() / N).sum((-2, -1)) / 2 + distance


def dgd_printed(W: Tensor, x: Tensor, delta: Tensor, eta: Scalar) -> Tensor:
    """Return the paper's step, eta' = eta / (1 + eta), which diverges for long inputs."""
    return W - eta / (1 + eta) * torch.outer(W @ x + delta, x)


def dgd_short(W: Tensor, x: Tensor, delta: Tensor, eta: Scalar) -> Tensor:
    """Return the step of the paper's shorter version, W (I - x x') - eta delta x'."""
    return W - torch.outer(W @ x + eta * delta, x)


def dgd_row(w: Tensor, x: Tensor, delta: Tensor, eta: Scalar) -> Tensor:
    """Eq. 57v: one row, w' = w - eta' (w . x + delta) x."""
    step = eta / (1 + eta * x.square().sum(-1)) * ((w * x).sum(-1) + delta)
    return w - step[..., None] * x


def dgd_gain(gamma: Tensor, x: Tensor, delta: Tensor, eta: Scalar) -> Tensor:
    """Eq. 57v: a gain y = gamma x is a diagonal: gamma_j' = gamma_j - eta'_j (gamma_j x_j + delta_j) x_j."""
    return gamma - eta / (1 + eta * x.square()) * (gamma * x + delta) * x


def ggd(
    W: Tensor,
    x: Tensor,
    delta: Tensor,
    eta: Scalar,
    *,
    objective: Literal["l2", "dot"] = "l2",
    value: Value = "minus_delta",
    window: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Eq. 59,60: argmin over W of L(W x, u) + sum over i of w_i |W - W_i|^2 / (2 eta).

    L is 1/2 |W x - u|^2 ("l2") or -W x . u ("dot"); u is -delta, or W x - delta ("target": nothing is erased), or a
    function of W, x and delta. `window` are the last c weights and `weights` their w_i, which sum to 1.
    """
    center = W
    if window is not None:
        weights = window.new_full((len(window),), 1 / len(window)) if weights is None else weights
        center = (weights.reshape(-1, *[1] * W.ndim) * window).sum(0)
    if callable(value):
        u = value(W, x, delta)
    else:
        u = -delta if value == "minus_delta" else (W @ x[..., None])[..., 0] - delta
    if objective == "dot":
        return center + eta * u[..., None] * x[..., None, :]
    return dgd(center, x, -u, eta)
