"""Changes of weights, one a row of the batch: sums of outer products while those are smaller, dense from then on.

Symbols: W a weight [o, i]; x its input, delta the gradient at its output; R outer products in a sum.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.nested.state import LowRankChange

WeightChange = LowRankChange | Tensor
MIN_SQUARED_NORM = 1e-30  # a squared length that counts as none; its root is a float32 too


def zero_change(B: int, o: int, i: int, like: Tensor) -> LowRankChange:
    """No change: no outer product."""
    return LowRankChange(like.new_zeros(B, 0, o), like.new_zeros(B, 0, i))


def to_dense(change: WeightChange) -> Float[Tensor, "B o i"]:
    """The change as a matrix a row."""
    return change.dense if isinstance(change, LowRankChange) else change


def apply_change(change: WeightChange, x: Float[Tensor, "B T i"]) -> Float[Tensor, "B T o"]:
    """What the change adds to W x; R (o + i) multiplications a token where it is a sum."""
    if isinstance(change, LowRankChange):
        return (x @ change.right.mT) @ change.left
    return x @ change.mT


def is_empty(change: WeightChange) -> bool:
    """Whether it is a sum of no terms."""
    return isinstance(change, LowRankChange) and not change.left.shape[1]


def add(one: WeightChange, other: WeightChange) -> WeightChange:
    """The sum of both, dense where one of them is."""
    if isinstance(one, LowRankChange) and isinstance(other, LowRankChange):
        return LowRankChange(torch.cat([one.left, other.left], 1), torch.cat([one.right, other.right], 1))
    if is_empty(one) or is_empty(other):
        return other if is_empty(one) else one
    return to_dense(one) + to_dense(other)


def scale(change: WeightChange, factor: Float[Tensor, " B"] | float) -> WeightChange:
    """Each row's change that many times."""
    by = factor[:, None, None] if isinstance(factor, Tensor) else factor
    return LowRankChange(change.left * by, change.right) if isinstance(change, LowRankChange) else change * by


def smaller_form(change: WeightChange) -> WeightChange:
    """The same change in the form that takes less: dense from R = o i / (o + i) on."""
    if isinstance(change, LowRankChange):
        R, o, i = change.left.shape[1], change.left.shape[2], change.right.shape[2]
        return change.dense if R * (o + i) >= o * i else change
    return change


def frobenius_norm(change: WeightChange) -> Float[Tensor, " B"]:
    """The Frobenius norm of every row's change; its gradient at none is 0."""
    if isinstance(change, LowRankChange):
        squared = ((change.left @ change.left.mT) * (change.right @ change.right.mT)).sum((-2, -1))
    else:
        squared = change.square().sum((-2, -1))
    return squared.clamp(min=MIN_SQUARED_NORM).sqrt()


def where_rows(rows: Bool[Tensor, " B"], new: WeightChange, old: WeightChange) -> WeightChange:
    """`new` in those rows, `old` in the others; of sums both factors are zeros where they are not meant."""
    at = rows.to(new.left.device if isinstance(new, LowRankChange) else new.device)[:, None, None]
    if isinstance(new, LowRankChange) and isinstance(old, LowRankChange):
        mine, theirs = (LowRankChange(x.left * share, x.right * share) for x, share in ((new, at), (old, ~at)))
        return add(mine, theirs)
    return torch.where(at, to_dense(new), to_dense(old))
