"""Changes of weights, one per row of the batch: low-rank sums of outer products, or dense once that is smaller.

Symbols: W weight [o, i]; x its input, delta the gradient at its output; R outer products of a sum.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.nested.state import LowRankChange

WeightChange = LowRankChange | Tensor
MIN_SQUARED_NORM = 1e-30  # its root is representable in float32


def zero_change(B: int, o: int, i: int, like: Tensor) -> LowRankChange:
    """Return a change of rank 0."""
    return LowRankChange(like.new_zeros(B, 0, o), like.new_zeros(B, 0, i))


def to_dense(change: WeightChange) -> Float[Tensor, "B o i"]:
    """Return the change as a matrix per row."""
    return change.dense if isinstance(change, LowRankChange) else change


def apply_change(change: WeightChange, x: Float[Tensor, "B T i"]) -> Float[Tensor, "B T o"]:
    """Return what the change adds to W x; a low-rank change costs R (o + i) multiplications per token."""
    if isinstance(change, LowRankChange):
        return (x @ change.right.mT) @ change.left
    return x @ change.mT


def is_empty(change: WeightChange) -> bool:
    """Return whether the change has rank 0 by construction."""
    return isinstance(change, LowRankChange) and not change.left.shape[1]


def add(one: WeightChange, other: WeightChange) -> WeightChange:
    """Return the sum, dense if one of the two is dense."""
    if isinstance(one, LowRankChange) and isinstance(other, LowRankChange):
        return LowRankChange(torch.cat([one.left, other.left], 1), torch.cat([one.right, other.right], 1))
    if is_empty(one) or is_empty(other):
        return other if is_empty(one) else one
    if isinstance(one, LowRankChange):
        one, other = other, one
    if isinstance(other, LowRankChange):
        return torch.baddbmm(to_dense(one), other.left.mT, other.right)
    return to_dense(one) + other


def scale(change: WeightChange, factor: Float[Tensor, " B"] | float) -> WeightChange:
    """Multiply the change of each row by its factor."""
    by = factor[:, None, None] if isinstance(factor, Tensor) else factor
    return LowRankChange(change.left * by, change.right) if isinstance(change, LowRankChange) else change * by


def smaller_form(change: WeightChange) -> WeightChange:
    """Return the change in the form that stores less: dense from R = o i / (o + i) on."""
    if isinstance(change, LowRankChange):
        R, o, i = change.left.shape[1], change.left.shape[2], change.right.shape[2]
        return change.dense if R * (o + i) >= o * i else change
    return change


def frobenius_norm(change: WeightChange) -> Float[Tensor, " B"]:
    """Return the Frobenius norm of each row's change, with gradient 0 at 0."""
    if isinstance(change, LowRankChange):
        squared = ((change.left @ change.left.mT) * (change.right @ change.right.mT)).sum((-2, -1))
    else:
        squared = change.square().sum((-2, -1))
    return squared.clamp(min=MIN_SQUARED_NORM).sqrt()


def where_rows(rows: Bool[Tensor, " B"], new: WeightChange, old: WeightChange) -> WeightChange:
    """Return `new` in the rows of the mask and `old` in the others."""
    mask = rows.to(new.left.device if isinstance(new, LowRankChange) else new.device)[:, None, None]
    if isinstance(new, LowRankChange) and isinstance(old, LowRankChange):  # both, with zeros in each other's rows
        return add(
            LowRankChange(new.left * mask, new.right * mask), LowRankChange(old.left * ~mask, old.right * ~mask)
        )  # fmt: skip
    return torch.where(mask, to_dense(new), to_dense(old))
