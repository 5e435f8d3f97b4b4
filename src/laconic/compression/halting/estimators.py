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

from laconic.compression.halting.stop_distribution import (
    StopPosition,
    length_log_probs,
    length_probs,
    log_survival_gate,
    upcast,
)

MEAN_LENGTH_EMA = 0.99  # of the mean length that a target is held against


class TrainingSlots(NamedTuple):
    """How the places of one compression are read in training: which, and the log survival on their logits if soft."""

    valid: Bool[Tensor, "B K"]
    log_s: Float[Tensor, "B K"] | None


def mark_priced_if_read(
    has_targets: Bool[Tensor, "B w"], is_read_hard: Bool[Tensor, " B"] | None = None
) -> Bool[Tensor, "B w"]:
    """Eq. VL8: compressions with a price: those before a scored segment of the window, in windows not read `hard`."""
    found = F.pad(has_targets.flip(1).cumsum(1).flip(1)[:, 1:] > 0, (0, 1))
    return found if is_read_hard is None else found & ~is_read_hard[:, None]


def mark_priced_everywhere(num_tokens: Int[Tensor, "B w"]) -> Bool[Tensor, "B w"]:
    """Eq. CP6: every segment that has text is priced, also where nobody in the window reads its vectors."""
    return num_tokens > 0


def penalty_ramp(step: int, total_steps: int, start_fraction: float, ramp_fraction: float) -> float:
    """Eq. VL8: omega, 0 for the share `start` of the steps, then linear to 1 over the share `rise`."""
    begin, over = start_fraction * total_steps, ramp_fraction * total_steps
    return 0.0 if step < begin else min((step - begin) / over, 1.0) if over else 1.0


def length_penalty(
    expected_lengths: Float[Tensor, "B w"], is_priced: Bool[Tensor, "B w"], beta: float, omega: float = 1.0
) -> Float[Tensor, ""]:
    """Eq. VL8: omega beta sum over k of E[N_k], in nats beside sum CE; the loss is both over the scored tokens."""
    return omega * beta * upcast(expected_lengths).masked_fill(~is_priced, 0.0).sum()


def expected_memory_size(valid: Bool[Tensor, "B M"], log_s: Float[Tensor, "B M"] | None) -> Float[Tensor, " B"]:
    """E[m]: the live slots of a memory, each by its survival where it is soft; nothing flows back."""
    s = torch.ones(valid.shape, device=valid.device) if log_s is None else upcast(log_s).detach().exp()
    return s.masked_fill(~valid, 0.0).sum(1)


def ratio_penalty(
    expected_lengths: Float[Tensor, "B w"],
    num_tokens: Int[Tensor, "B w"],
    memory_sizes: Float[Tensor, "B w"],
    is_priced: Bool[Tensor, "B w"],
    price: float,
    alpha: float,
    num_compressions: float | None = None,
) -> Float[Tensor, ""]:
    """Eq. VL9: mean over k of lambda E[N_k] / (|S_k| + alpha sg(E[m_k])), `total` of them in the optimizer step.

    `tokens` are live ones of the text, `memory` is `old` of what stood in the prompt; no `total`: those counted here.
    It is added to nats per scored token as it is.
    """
    whole = num_tokens + alpha * upcast(memory_sizes).detach()
    shares = upcast(expected_lengths) / whole.masked_fill(~is_priced, 1.0)
    number = max(float(is_priced.sum()) if num_compressions is None else num_compressions, 1.0)
    return price * shares.masked_fill(~is_priced, 0.0).sum() / number


def length_entropy(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, " B"]:
    """H(P) in nats; 0 log 0 is 0, and so is its gradient."""
    log_p = length_log_probs(a, stop_position)
    log_p = log_p.where(log_p.isfinite(), 0.0)
    return -(log_p * length_probs(a, stop_position)).sum(1)


def kl_geometric(
    a: Float[Tensor, "B K"],
    stop_prob: float,
    tail: Literal["truncated", "forced"] = "truncated",
    stop_position: StopPosition = "after",
) -> Float[Tensor, " B"]:
    """Eq. VL10: KL(P || G), G(t) = g (1 - g)^(t - 1) / (1 - (1 - g)^K); forced: the tail stands on K instead."""
    p = length_probs(a, stop_position)
    n = p.shape[1]
    g = torch.tensor(stop_prob, dtype=torch.float64, device=a.device)
    log_g = torch.arange(n, device=a.device) * (-g).log1p() + g.log()
    if tail == "forced":
        log_g[-1] -= g.log()
    else:
        log_g -= (-((1 - g) ** n)).log1p()
    return -length_entropy(a, stop_position) - p @ log_g.to(p.dtype)


def entropy_floor_penalty(
    a: Float[Tensor, "B K"], weight: float, floor: float, stop_position: StopPosition = "after"
) -> Float[Tensor, " B"]:
    """Eq. VL11: weight max(0, floor - H(P)), in nats."""
    return weight * (floor - length_entropy(a, stop_position)).clamp(min=0.0)


class PriceState(NamedTuple):
    """beta, and the running mean of E[N] that steers it; None before the first step."""

    beta: float
    mean_length: float | None = None


def update_price(
    state: PriceState, expected_length: float, target_length: float, step_size: float, max_price: float
) -> PriceState:
    """Eq. VL12: beta <- clip(beta + eta (EMA(E[N]) - target), 0, most), after an optimizer step; EMA .99."""
    mean = (
        expected_length
        if state.mean_length is None
        else MEAN_LENGTH_EMA * state.mean_length + (1 - MEAN_LENGTH_EMA) * expected_length
    )
    return PriceState(min(max(state.beta + step_size * (mean - target_length), 0.0), max_price), mean)


def first_slots_mask(N: Int[Tensor, " B"], K: int) -> Bool[Tensor, "B K"]:
    """The first N of K places."""
    return torch.arange(K, device=N.device) < N[:, None]


def mean_field_slots(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> TrainingSlots:
    """Eq. VL19: all K places read once, each by the log of its survival; the gradient comes through that gate."""
    log_s = log_survival_gate(a, stop_position)
    return TrainingSlots(torch.ones_like(log_s, dtype=torch.bool), log_s)


def straight_through_slots(
    a: Float[Tensor, "B K"], N: Int[Tensor, " B"], stop_position: StopPosition = "after"
) -> TrainingSlots:
    """Eq. VL21: the first N places, each with the bias log s_t - sg(log s_t), 0 in value; the others dead."""
    log_s, live = log_survival_gate(a, stop_position), first_slots_mask(N, a.shape[1])
    log_s = log_s.masked_fill(~live, 0.0)
    return TrainingSlots(live, log_s - log_s.detach())


def exploration_mixture(
    a: Float[Tensor, "B K"], uniform_share: float, lengths: tuple[int, ...], stop_position: StopPosition = "after"
) -> Float[Tensor, "B n"]:
    """(1 - share) P + share uniform over the lengths that N takes, `support` of those allowed; columns as P's."""
    p = length_probs(a, stop_position)
    columns = torch.tensor(lengths, device=a.device) - (a.shape[1] + 1 - p.shape[1])
    even = torch.zeros(p.shape[1], dtype=p.dtype, device=a.device)
    even[columns] = 1 / len(lengths)
    return (1 - uniform_share) * p + uniform_share * even


def sample_column(p: Float[Tensor, "B n"], u: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The column of a law by one draw u in [0, 1) a row: the first whose cumulated probability is more than u."""
    over = p.double().cumsum(1) > u[:, None]
    least = p.shape[1] - 1 - (p > 0).flip(1).long().argmax(1)  # the last that occurs, if a sum falls short of 1
    return torch.where(over.any(1), over.long().argmax(1), least)


def cost_to_go(nats: Float[Tensor, "*B w"], price: Float[Tensor, "*B w"]) -> Float[Tensor, "*B w"]:
    """Eq. VL20: G_k = sum over i > k of CE_i + sum over j > k of beta E[N_j]; the price of k itself is not in it."""
    both = upcast(nats + price).detach()
    return both.flip(-1).cumsum(-1).flip(-1) - both


def reinforce_two_samples(
    log_p: Float[Tensor, "2 B w"],
    G: Float[Tensor, "2 B w"],
    is_priced: Bool[Tensor, "B w"],
    importance_weights: Float[Tensor, "2 B w"] | None = None,
) -> Float[Tensor, ""]:
    """Eq. VL20: sum over k of sg((G_k - G'_k) / 2) (log P(N_k) - log P(N'_k)), two draws of a row side by side.

    `weight` is P / mixture of each draw where it came from a mixture. Only the gradient means anything.
    """
    half = (G[0] - G[1]).detach() / 2
    scores = upcast(log_p) if importance_weights is None else importance_weights.detach() * upcast(log_p)
    return (half * (scores[0] - scores[1])).masked_fill(~is_priced, 0.0).sum()


def reinforce_row_baseline(
    log_p: Float[Tensor, "B w"],
    G: Float[Tensor, "B w"],
    is_priced: Bool[Tensor, "B w"],
    importance_weights: Float[Tensor, "B w"] | None = None,
) -> Float[Tensor, ""]:
    """The score term of one draw a row, against the mean G of the other rows, 0 where there is no other."""
    kept = G.detach().masked_fill(~is_priced, 0.0)
    others = (is_priced.sum(0) - 1).clamp(min=1)
    baseline = (kept.sum(0) - kept) / others
    scores = upcast(log_p) if importance_weights is None else importance_weights.detach() * upcast(log_p)
    return ((kept - baseline) * scores).masked_fill(~is_priced, 0.0).sum()


def ponder_loss(
    a: Float[Tensor, "B K"],
    trial_losses: Float[Tensor, "B n"],
    lengths: tuple[int, ...],
    beta: float,
    stop_position: StopPosition = "after",
) -> Float[Tensor, " B"]:
    """Eq. VL22: sum over n of P(n) (CE_{k+1}(n) + beta n), `nats` of the next segment read after each length n."""
    p = length_probs(a, stop_position)
    n = torch.tensor(lengths, device=a.device)
    cost = upcast(trial_losses) + beta * n.to(p.dtype)
    return (p[:, n - (a.shape[1] + 1 - p.shape[1])] * cost).sum(1)


def best_length_label(trial_losses: Float[Tensor, "B n"], lengths: tuple[int, ...], beta: float) -> Int[Tensor, " B"]:
    """Eq. VL24: which of the lengths has the least CE_{k+1}(n) + beta n, found by trial; the shorter of two alike."""
    trial_losses = upcast(trial_losses).detach()
    return (trial_losses + beta * torch.tensor(lengths, dtype=trial_losses.dtype, device=trial_losses.device)).argmin(1)
