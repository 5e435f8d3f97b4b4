"""Retrieval with precompressed passages, and label choice by likelihood: equations AC8 to AC11.

AutoCompressors (arXiv:2305.14788), section 5; REPLUG (arXiv:2301.12652) for mixing after reading.

Symbols: sigma_d vectors of passage d, sigma_x those of the query; x the input, y the output; n passages, C possible
answers. Likelihoods are logarithms.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.models.attention import accumulation_dtype


def fuse_summaries(with_memory: Float[Tensor, "*T"], alone: Float[Tensor, "*T"]) -> Float[Tensor, "*T"]:
    """Eq. AC8: log p(y | x, D) = log 1/2 [p(y | sigma_dk .. sigma_d1, x) + p(y | x)], the least relevant first."""
    return torch.logaddexp(with_memory, alone) - math.log(2)


def replug(log_p: Float[Tensor, "n *T"], scores: Float[Tensor, " n"]) -> Float[Tensor, "*T"]:
    """Eq. AC9: log p(y | x) = log sum over d of lambda(d, x) p(y | sigma_d, x), lambda the softmax of the scores."""
    weight = scores.log_softmax(0, dtype=accumulation_dtype(scores.dtype))
    return (log_p + weight.view(-1, *[1] * (log_p.ndim - 1))).logsumexp(0)


def order_passages(passages: Float[Tensor, "n K D"], query: Float[Tensor, "K D"]) -> Int[Tensor, " n"]:
    """Eq. AC10: passages by |sigma_d - sigma_x|_2, the nearest last; ties keep their order."""
    distance = (passages - query).to(accumulation_dtype(passages.dtype)).flatten(1).square().sum(1)
    return distance.argsort(dim=0, descending=True, stable=True)


def choose_answer(
    nats: Float[Tensor, "*B C"],
    tokens: Int[Tensor, "*B C"],
    without: Float[Tensor, "*B C"] | None = None,
) -> Int[Tensor, "*B"]:
    """Eq. AC11: argmin over c of the mean nats per token of answer c, minus those with the inputs replaced by "N/A"."""
    mean = nats / tokens
    return (mean if without is None else mean - without / tokens).argmin(-1)
