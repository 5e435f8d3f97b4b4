"""Changes of weights, one a row of the batch: sums of outer products while those are smaller, dense from then on.

Symbols: W a weight [o, i]; x its input, delta the gradient at its output; R outer products in a sum.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.core.state import Factors

Change = Factors | Tensor
TINY = 1e-30  # a squared length that counts as none; its root is a float32 too


def nothing(B: int, o: int, i: int, like: Tensor) -> Factors:
    """No change: no outer product."""
    return Factors(like.new_zeros(B, 0, o), like.new_zeros(B, 0, i))


def dense(change: Change) -> Float[Tensor, "B o i"]:
    """The change as a matrix a row."""
    return change.dense if isinstance(change, Factors) else change


def applied(change: Change, x: Float[Tensor, "B T i"]) -> Float[Tensor, "B T o"]:
    """What the change adds to W x; R (o + i) multiplications a token where it is a sum."""
    if isinstance(change, Factors):
        return (x @ change.right.mT) @ change.left
    return x @ change.mT


def is_none(change: Change) -> bool:
    """Whether it is a sum of no terms."""
    return isinstance(change, Factors) and not change.left.shape[1]


def plus(one: Change, other: Change) -> Change:
    """The sum of both, dense where one of them is."""
    if isinstance(one, Factors) and isinstance(other, Factors):
        return Factors(torch.cat([one.left, other.left], 1), torch.cat([one.right, other.right], 1))
    if is_none(one) or is_none(other):
        return other if is_none(one) else one
    return dense(one) + dense(other)


def times(change: Change, share: Float[Tensor, " B"] | float) -> Change:
    """Each row's change that many times."""
    by = share[:, None, None] if isinstance(share, Tensor) else share
    return Factors(change.left * by, change.right) if isinstance(change, Factors) else change * by


def folded(change: Change) -> Change:
    """The same change in the form that takes less: dense from R = o i / (o + i) on."""
    if isinstance(change, Factors):
        R, o, i = change.left.shape[1], change.left.shape[2], change.right.shape[2]
        return change.dense if R * (o + i) >= o * i else change
    return change


def length(change: Change) -> Float[Tensor, " B"]:
    """The Frobenius norm of every row's change; its gradient at none is 0."""
    if isinstance(change, Factors):
        squared = ((change.left @ change.left.mT) * (change.right @ change.right.mT)).sum((-2, -1))
    else:
        squared = change.square().sum((-2, -1))
    return squared.clamp(min=TINY).sqrt()


def chosen(rows: Bool[Tensor, " B"], new: Change, old: Change) -> Change:
    """`new` in those rows, `old` in the others; of sums both factors are zeros where they are not meant."""
    at = rows.to(new.left.device if isinstance(new, Factors) else new.device)[:, None, None]
    if isinstance(new, Factors) and isinstance(old, Factors):
        mine, theirs = (Factors(x.left * share, x.right * share) for x, share in ((new, at), (old, ~at)))
        return plus(mine, theirs)
    return torch.where(at, dense(new), dense(old))
