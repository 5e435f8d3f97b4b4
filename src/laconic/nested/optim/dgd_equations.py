"""Delta gradient descent (DGD): gradient steps of a linear map that also erase its response to the current input.

Nested Learning arXiv:2512.24695, section 4.5. A step minimises Eq. 56; Eq. 57 is its solution for one input, and the
ledger's 57b and 57v are its extensions to several inputs and to embeddings.

Symbols: W weight [o, i]; x input [i] and delta the gradient of the loss at y = W x [o]; X, D their rows over N
positions; G = D'X/N and A = X'X/N, ' for transposed; eta the step size. Leading dimensions are independent memories.
Sums are taken in float32 or wider. Only positions marked in `valid` are used.
"""

from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.errors import NonFiniteError
from laconic.models.attention import accumulation_dtype

Scalar = float | int | Tensor  # beartype does not accept an int for a float
Reduction = Literal["mean", "sum"]
Weight = Float[Tensor, "*B o i"]
ValidMask = Bool[Tensor, "*B N"]


def to_accumulation_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors to float32, or keep a wider type."""
    return tuple(t.to(accumulation_dtype(t.dtype)) for t in tensors)


def mask_and_count(X: Tensor, D: Tensor, valid: Tensor | None, reduction: Reduction) -> tuple[Tensor, Tensor, Tensor]:
    """Return X and D with zeros in rows that are not valid, and the divisor N: 1 for sums, else the valid rows."""
    x, d = to_accumulation_dtype(X, D)
    if valid is not None:
        x, d = x * valid[..., None], d * valid[..., None]
    if reduction == "sum":
        return x, d, x.new_ones(())
    if valid is None:
        return x, d, x.new_tensor(x.shape[-2])
    return x, d, valid.sum(-1).clamp(min=1).to(x.dtype)[..., None, None]


def dgd(W: Weight, x: Float[Tensor, "*B i"], delta: Float[Tensor, "*B o"], eta: Scalar) -> Weight:
    """Eq. 57: W' = W - eta' (W x + delta) x', eta' = eta / (1 + eta |x|^2), the minimiser of Eq. 56 for any |x|.

    The paper prints eta' = eta / (1 + eta), which is the minimiser only if |x| = 1, and diverges for long inputs.
    """
    w, x, delta = to_accumulation_dtype(W, x, delta)
    with torch.autocast(W.device.type, enabled=False):
        error = (w @ x[..., None])[..., 0] + delta
        step = (eta / (1 + eta * x.square().sum(-1)))[..., None] * error
        return (w - step[..., None] * x[..., None, :]).to(W.dtype)


def solve_ridge(R: Weight, X: Float[Tensor, "*B N i"], c: Scalar) -> Weight:
    """Compute R (I + c X'X)^-1 for c >= 0, by Cholesky on the smaller of [i, i] and [N, N]."""
    if X.shape[-1] <= X.shape[-2]:
        return right_divide(R, c * (X.mT @ X))
    return R - right_divide(R @ X.mT, c * (X @ X.mT)) @ (c * X)


def right_divide(R: Float[Tensor, "*B o n"], A: Float[Tensor, "*B n n"]) -> Float[Tensor, "*B o n"]:
    """Compute R (I + A)^-1 for a symmetric positive semidefinite A."""
    regularized = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    factor, failed = cast("tuple[Tensor, Tensor]", cast(Any, torch.linalg).cholesky_ex(regularized))
    if failed.any():
        raise NonFiniteError("dgd: I + eta A has no Cholesky factor: an input is not finite, or eta is beyond float32")
    return torch.cholesky_solve(R.mT, factor).mT


def dgd_joint(
    W: Weight,
    X: Float[Tensor, "*B N i"],
    D: Float[Tensor, "*B N o"],
    eta: Scalar,
    *,
    valid: ValidMask | None = None,
    reduction: Reduction = "mean",
) -> Weight:
    """Eq. 57b: W' = (W - eta G)(I + eta A)^-1, the minimiser of Eq. 56 over all N positions, in any order.

    With `reduction="sum"`, G and A are sums over positions.
    """
    x, d, N = mask_and_count(X, D, valid, reduction)
    with torch.autocast(W.device.type, enabled=False):
        return solve_ridge(W.to(x.dtype) - eta * (d.mT @ x) / N, x, eta / N).to(W.dtype)


def dgd_gram(W: Weight, G: Weight, A: Float[Tensor, "*B i i"], eta: Scalar) -> Weight:
    """Eq. 57b: compute the step of `dgd_joint` from G and A, without the N inputs."""
    w, g, a = to_accumulation_dtype(W, G, A)
    with torch.autocast(W.device.type, enabled=False):
        return right_divide(w - eta * g, eta * a).to(W.dtype)


def dgd_embedding(
    e: Float[Tensor, "V D"],
    G: Float[Tensor, "V D"],
    count: Int[Tensor, " V"] | Float[Tensor, " V"],
    N: Scalar,
    eta: Scalar,
) -> Float[Tensor, "V D"]:
    """Eq. 57v: e_j' = (e_j - eta G_j) / (1 + eta count_j / N), for row j that occurs count_j times in N positions.

    This is Eq. 57b for an embedding, whose inputs are one-hot.
    """
    return (e - eta * G) / (1 + eta * count.to(e.dtype) / N)[:, None]
