"""What a vector costs, and how a stop head learns from it: prices, priors, and four estimators of its gradient.

ACT (arXiv:1603.08983), PonderNet (2107.05407), the variable-length variant of AutoCompressors
(jo100sun/AutoCompressors bb15bc1); the score term is REINFORCE (doi:10.1007/BF00992696) with a second draw as baseline.

Symbols: w segments of a window, k a compression in it; N_k its vectors, E[N_k] their mean; CE_i nats of segment i;
beta nats a vector costs; P the law of N. All of it is float32, float64 if given.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.methods.halting import Index, gate, log_probabilities, precise, probabilities

EMA = 0.99  # of the mean length that a target is held against


class Slots(NamedTuple):
    """How the places of one compression are read in training: which, and the log survival on their logits if soft."""

    live: Bool[Tensor, "B K"]
    log_s: Float[Tensor, "B K"] | None


def read(scored: Bool[Tensor, "B w"], hard: Bool[Tensor, " B"] | None = None) -> Bool[Tensor, "B w"]:
    """Eq. VL8: compressions with a price: those before a scored segment of the window, in windows not read `hard`."""
    found = F.pad(scored.flip(1).cumsum(1).flip(1)[:, 1:] > 0, (0, 1))
    return found if hard is None else found & ~hard[:, None]


def everywhere(tokens: Int[Tensor, "B w"]) -> Bool[Tensor, "B w"]:
    """Eq. CP6: every segment that has text is priced, also where nobody in the window reads its vectors."""
    return tokens > 0


def ramp(step: int, steps: int, start: float, rise: float) -> float:
    """Eq. VL8: omega, 0 for the share `start` of the steps, then linear to 1 over the share `rise`."""
    begin, over = start * steps, rise * steps
    return 0.0 if step < begin else min((step - begin) / over, 1.0) if over else 1.0


def penalty(
    lengths: Float[Tensor, "B w"], counted: Bool[Tensor, "B w"], beta: float, omega: float = 1.0
) -> Float[Tensor, ""]:
    """Eq. VL8: omega beta sum over k of E[N_k], in nats beside sum CE; the loss is both over the scored tokens."""
    return omega * beta * precise(lengths).masked_fill(~counted, 0.0).sum()


def old(live: Bool[Tensor, "B M"], log_s: Float[Tensor, "B M"] | None) -> Float[Tensor, " B"]:
    """E[m]: the live slots of a memory, each by its survival where it is soft; nothing flows back."""
    s = torch.ones(live.shape, device=live.device) if log_s is None else precise(log_s).detach().exp()
    return s.masked_fill(~live, 0.0).sum(1)


def ratio_penalty(
    lengths: Float[Tensor, "B w"],
    tokens: Int[Tensor, "B w"],
    memory: Float[Tensor, "B w"],
    counted: Bool[Tensor, "B w"],
    price: float,
    alpha: float,
    total: float | None = None,
) -> Float[Tensor, ""]:
    """Eq. VL9: mean over k of lambda E[N_k] / (|S_k| + alpha sg(E[m_k])), `total` of them in the optimizer step.

    `tokens` are live ones of the text, `memory` is `old` of what stood in the prompt; no `total`: those counted here.
    It is added to nats per scored token as it is.
    """
    whole = tokens + alpha * precise(memory).detach()
    shares = precise(lengths) / whole.masked_fill(~counted, 1.0)
    number = max(float(counted.sum()) if total is None else total, 1.0)
    return price * shares.masked_fill(~counted, 0.0).sum() / number


def entropy(a: Float[Tensor, "B K"], index: Index = "after") -> Float[Tensor, " B"]:
    """H(P) in nats; 0 log 0 is 0, and so is its gradient."""
    log_p = log_probabilities(a, index)
    log_p = log_p.where(log_p.isfinite(), 0.0)
    return -(log_p * probabilities(a, index)).sum(1)


def kl_geometric(
    a: Float[Tensor, "B K"],
    prior: float,
    form: Literal["truncated", "forced"] = "truncated",
    index: Index = "after",
) -> Float[Tensor, " B"]:
    """Eq. VL10: KL(P || G), G(t) = g (1 - g)^(t - 1) / (1 - (1 - g)^K); forced: the tail stands on K instead."""
    p = probabilities(a, index)
    n = p.shape[1]
    g = torch.tensor(prior, dtype=torch.float64, device=a.device)
    log_g = torch.arange(n, device=a.device) * (-g).log1p() + g.log()
    if form == "forced":
        log_g[-1] -= g.log()
    else:
        log_g -= (-((1 - g) ** n)).log1p()
    return -entropy(a, index) - p @ log_g.to(p.dtype)


def entropy_floor(a: Float[Tensor, "B K"], weight: float, floor: float, index: Index = "after") -> Float[Tensor, " B"]:
    """Eq. VL11: weight max(0, floor - H(P)), in nats."""
    return weight * (floor - entropy(a, index)).clamp(min=0.0)


class Price(NamedTuple):
    """beta, and the running mean of E[N] that steers it; None before the first step."""

    beta: float
    mean: float | None = None


def target_price(held: Price, length: float, target: float, eta: float, most: float) -> Price:
    """Eq. VL12: beta <- clip(beta + eta (EMA(E[N]) - target), 0, most), after an optimizer step; EMA .99."""
    mean = length if held.mean is None else EMA * held.mean + (1 - EMA) * length
    return Price(min(max(held.beta + eta * (mean - target), 0.0), most), mean)


def first_slots(N: Int[Tensor, " B"], K: int) -> Bool[Tensor, "B K"]:
    """The first N of K places."""
    return torch.arange(K, device=N.device) < N[:, None]


def mean_field(a: Float[Tensor, "B K"], index: Index = "after") -> Slots:
    """Eq. VL19: all K places read once, each by the log of its survival; the gradient comes through that gate."""
    log_s = gate(a, index)
    return Slots(torch.ones_like(log_s, dtype=torch.bool), log_s)


def straight(a: Float[Tensor, "B K"], N: Int[Tensor, " B"], index: Index = "after") -> Slots:
    """Eq. VL21: the first N places, each with the bias log s_t - sg(log s_t), 0 in value; the others dead."""
    log_s, live = gate(a, index), first_slots(N, a.shape[1])
    log_s = log_s.masked_fill(~live, 0.0)
    return Slots(live, log_s - log_s.detach())


def mixture(
    a: Float[Tensor, "B K"], share: float, lengths: tuple[int, ...], index: Index = "after"
) -> Float[Tensor, "B n"]:
    """(1 - share) P + share uniform over the lengths that N takes, `support` of those allowed; columns as P's."""
    p = probabilities(a, index)
    columns = torch.tensor(lengths, device=a.device) - (a.shape[1] + 1 - p.shape[1])
    even = torch.zeros(p.shape[1], dtype=p.dtype, device=a.device)
    even[columns] = 1 / len(lengths)
    return (1 - share) * p + share * even


def drawn(p: Float[Tensor, "B n"], u: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The column of a law by one draw u in [0, 1) a row: the first whose cumulated probability is more than u."""
    over = p.double().cumsum(1) > u[:, None]
    least = p.shape[1] - 1 - (p > 0).flip(1).long().argmax(1)  # the last that occurs, if a sum falls short of 1
    return torch.where(over.any(1), over.long().argmax(1), least)


def to_go(nats: Float[Tensor, "*B w"], price: Float[Tensor, "*B w"]) -> Float[Tensor, "*B w"]:
    """Eq. VL20: G_k = sum over i > k of CE_i + sum over j > k of beta E[N_j]; the price of k itself is not in it."""
    both = precise(nats + price).detach()
    return both.flip(-1).cumsum(-1).flip(-1) - both


def score_term(
    log_p: Float[Tensor, "2 B w"],
    G: Float[Tensor, "2 B w"],
    counted: Bool[Tensor, "B w"],
    weight: Float[Tensor, "2 B w"] | None = None,
) -> Float[Tensor, ""]:
    """Eq. VL20: sum over k of sg((G_k - G'_k) / 2) (log P(N_k) - log P(N'_k)), two draws of a row side by side.

    `weight` is P / mixture of each draw where it came from a mixture. Only the gradient means anything.
    """
    half = (G[0] - G[1]).detach() / 2
    scores = precise(log_p) if weight is None else weight.detach() * precise(log_p)
    return (half * (scores[0] - scores[1])).masked_fill(~counted, 0.0).sum()


def score_rows(
    log_p: Float[Tensor, "B w"],
    G: Float[Tensor, "B w"],
    counted: Bool[Tensor, "B w"],
    weight: Float[Tensor, "B w"] | None = None,
) -> Float[Tensor, ""]:
    """The score term of one draw a row, against the mean G of the other rows, 0 where there is no other."""
    kept = G.detach().masked_fill(~counted, 0.0)
    others = (counted.sum(0) - 1).clamp(min=1)
    baseline = (kept.sum(0) - kept) / others
    scores = precise(log_p) if weight is None else weight.detach() * precise(log_p)
    return ((kept - baseline) * scores).masked_fill(~counted, 0.0).sum()


def ponder(
    a: Float[Tensor, "B K"],
    nats: Float[Tensor, "B n"],
    lengths: tuple[int, ...],
    beta: float,
    index: Index = "after",
) -> Float[Tensor, " B"]:
    """Eq. VL22: sum over n of P(n) (CE_{k+1}(n) + beta n), `nats` of the next segment read after each length n."""
    p = probabilities(a, index)
    n = torch.tensor(lengths, device=a.device)
    cost = precise(nats) + beta * n.to(p.dtype)
    return (p[:, n - (a.shape[1] + 1 - p.shape[1])] * cost).sum(1)


def ratio_label(nats: Float[Tensor, "B n"], lengths: tuple[int, ...], beta: float) -> Int[Tensor, " B"]:
    """Eq. VL24: which of the lengths has the least CE_{k+1}(n) + beta n, found by trial; the shorter of two alike."""
    nats = precise(nats).detach()
    return (nats + beta * torch.tensor(lengths, dtype=nats.dtype, device=nats.device)).argmin(1)
