"""Prices and gradient estimators for training the stop head, which learns how many vectors to keep.

ACT (arXiv:1603.08983), PonderNet (arXiv:2107.05407), the variable-length AutoCompressor (jo100sun/AutoCompressors
bb15bc1).

Symbols: w segments in a window, k a compression in it; N_k its number of vectors, E[N_k] the mean; CE_i the
cross-entropy of segment i in nats; beta the price of a vector in nats; P the distribution of N. Everything is computed
in float32 (float64 if the input is).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.halting.stop_distribution import StopPosition, length_log_probs, length_probs, log_survival_gate, upcast


def mark_priced_if_read(
    has_targets: Bool[Tensor, "B w"], is_read_hard: Bool[Tensor, " B"] | None = None
) -> Bool[Tensor, "B w"]:
    """Eq. VL8: mark compressions that a later scored segment of the window reads, except in rows that read it hard."""
    priced = F.pad(has_targets.flip(1).cumsum(1).flip(1)[:, 1:] > 0, (0, 1))
    return priced if is_read_hard is None else priced & ~is_read_hard[:, None]


def mark_priced_everywhere(num_tokens: Int[Tensor, "B w"]) -> Bool[Tensor, "B w"]:
    """Eq. CP6: mark every segment with text, even if nothing in the window reads its vectors."""
    return num_tokens > 0


def penalty_ramp(step: int, total_steps: int, start_fraction: float, ramp_fraction: float) -> float:
    """Eq. VL8: omega, 0 for the first `start_fraction` of the steps, then linear to 1 over `ramp_fraction`."""
    start = start_fraction * total_steps
    width = ramp_fraction * total_steps
    if step < start:
        return 0.0
    return min((step - start) / width, 1.0) if width else 1.0


def length_penalty(
    expected_lengths: Float[Tensor, "B w"], is_priced: Bool[Tensor, "B w"], beta: float, omega: float = 1.0
) -> Float[Tensor, ""]:
    """Eq. VL8: omega beta sum over k of E[N_k], in nats, added to sum CE before both are divided by scored tokens."""
    return omega * beta * upcast(expected_lengths).masked_fill(~is_priced, 0.0).sum()


def expected_memory_size(valid: Bool[Tensor, "B M"], log_s: Float[Tensor, "B M"] | None) -> Float[Tensor, " B"]:
    """Compute E[m], the number of valid slots weighted by survival where it is soft; no gradient flows back."""
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
    """Eq. VL9: mean over k of lambda E[N_k] / (|S_k| + alpha sg(E[m_k])), added as it is to nats per scored token.

    |S_k| are the tokens of the segment's text, E[m_k] the `expected_memory_size` of the memory in the prompt, lambda
    the price, and alpha the weight of the older memory. The mean is over the priced compressions of the optimizer step
    (`num_compressions`), by default those marked here.
    """
    whole = num_tokens + alpha * upcast(memory_sizes).detach()
    ratios = upcast(expected_lengths) / whole.masked_fill(~is_priced, 1.0)
    denominator = max(float(is_priced.sum()) if num_compressions is None else num_compressions, 1.0)
    return price * ratios.masked_fill(~is_priced, 0.0).sum() / denominator


def length_entropy(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, " B"]:
    """Compute H(P) in nats; 0 log 0 is 0, and so is its gradient."""
    log_p = length_log_probs(a, stop_position)
    log_p = log_p.where(log_p.isfinite(), 0.0)
    return -(log_p * length_probs(a, stop_position)).sum(1)


def first_slots_mask(N: Int[Tensor, " B"], K: int) -> Bool[Tensor, "B K"]:
    return torch.arange(K, device=N.device) < N[:, None]


def mean_field_gate(a: Float[Tensor, "B K"], stop_position: StopPosition = "after") -> Float[Tensor, "B K"]:
    """Eq. VL19: log P(N >= t), the gate of each of the K positions, which are all read once."""
    return log_survival_gate(a, stop_position)


def sample_column(p: Float[Tensor, "B n"], u: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Sample a column of each row of p by inverse transform: the first whose cumulative probability exceeds u."""
    exceeds = p.double().cumsum(1) > u[:, None]
    # If rounding leaves the total below u, take the last column with non-zero probability.
    last_possible = p.shape[1] - 1 - (p > 0).flip(1).long().argmax(1)
    return torch.where(exceeds.any(1), exceeds.long().argmax(1), last_possible)


def ponder_loss(
    a: Float[Tensor, "B K"],
    trial_losses: Float[Tensor, "B n"],
    lengths: tuple[int, ...],
    beta: float,
    stop_position: StopPosition = "after",
) -> Float[Tensor, " B"]:
    """Eq. VL22: sum over n of P(n) (CE_{k+1}(n) + beta n).

    `trial_losses` are CE_{k+1}(n), the next segment's loss after each of the `lengths`.
    """
    p = length_probs(a, stop_position)
    n = torch.tensor(lengths, device=a.device)
    cost = upcast(trial_losses) + beta * n.to(p.dtype)
    return (p[:, n - (a.shape[1] + 1 - p.shape[1])] * cost).sum(1)


def best_length_label(trial_losses: Float[Tensor, "B n"], lengths: tuple[int, ...], beta: float) -> Int[Tensor, " B"]:
    """Eq. VL24: index of the length with the least CE_{k+1}(n) + beta n; ties go to the shorter length."""
    nats = upcast(trial_losses).detach()
    return (nats + beta * torch.tensor(lengths, dtype=nats.dtype, device=nats.device)).argmin(1)
