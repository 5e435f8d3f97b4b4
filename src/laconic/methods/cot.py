"""The written chain and its two ends: no chain at all, a chain written out, and the loss that all methods share.

KaVa arXiv:2510.02312, equations 5a and 5b. Symbols: N tokens scored, of a row or of all rows; p the model's softmax.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from laconic.core.attention import wide
from laconic.core.contract import UNSCORED

Reduction = Literal["token", "row"]
Logits = Callable[[Tensor], Tensor]


class Scored(NamedTuple):
    """A cross-entropy in nats, and the share of the same tokens, weighted alike, whose likeliest id is the target."""

    loss: Float[Tensor, ""]
    right: Float[Tensor, ""]


def scored(targets: Int[Tensor, "B T"], reduction: Reduction = "token") -> float:
    """What the sum of a cross-entropy is divided by: tokens that are scored, or rows that have one."""
    there = targets != UNSCORED
    return float((there if reduction == "token" else there.any(1)).sum())


def nll(
    logits: Logits,
    hidden: Float[Tensor, "B T D"],
    targets: Int[Tensor, "B T"],
    reduction: Reduction = "token",
    total: float | None = None,
) -> Scored:
    """Eq. 5a,5b: -(1/N) sum log p(target | all before), over the scored tokens of the batch (or row by row)."""
    there = targets != UNSCORED
    total = scored(targets, reduction) if total is None else total
    rows = logits(hidden[there])
    asked, rows = targets[there], rows.to(wide(rows.dtype))
    each = F.cross_entropy(rows, asked, reduction="none")
    hit = (rows.detach().argmax(-1) == asked).to(each.dtype)
    if reduction == "row":
        share = (there / there.sum(1, keepdim=True).clamp(min=1))[there].to(each.dtype)
        each, hit = each * share, hit * share
    return Scored(each.sum() / (total or 1.0), hit.sum() / (total or 1.0))
