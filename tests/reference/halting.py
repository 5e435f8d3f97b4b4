"""Priors, price control and the straight-through estimator: equations VL10 to VL12 and VL21, which no recipe uses.

PonderNet (arXiv:2107.05407), the variable-length AutoCompressor (jo100sun/AutoCompressors bb15bc1). Symbols as in
`laconic.halting.estimators`.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.halting.estimators import first_slots_mask, length_entropy
from laconic.halting.stop_distribution import StopPosition, length_probs, log_survival_gate

MEAN_LENGTH_EMA = 0.99  # decay of the mean length that is compared with the target


def kl_geometric(
    a: Float[Tensor, "B K"], stop_prob: float, stop_position: StopPosition = "after"
) -> Float[Tensor, " B"]:
    """Eq. VL10: KL(P || G) with the geometric G(t) = g (1 - g)^(t - 1) / (1 - (1 - g)^K); g is `stop_prob`."""
    p = length_probs(a, stop_position)
    n = p.shape[1]
    g = torch.tensor(stop_prob, dtype=torch.float64, device=a.device)
    log_g = torch.arange(n, device=a.device) * (-g).log1p() + g.log() - (-((1 - g) ** n)).log1p()
    return -length_entropy(a, stop_position) - p @ log_g.to(p.dtype)


def entropy_floor_penalty(
    a: Float[Tensor, "B K"], weight: float, floor: float, stop_position: StopPosition = "after"
) -> Float[Tensor, " B"]:
    """Eq. VL11: weight max(0, floor - H(P)), in nats."""
    return weight * (floor - length_entropy(a, stop_position)).clamp(min=0.0)


def update_price(
    beta: float, mean: float | None, expected_length: float, target: float, step_size: float, max_price: float
) -> tuple[float, float]:
    """Eq. VL12: beta <- clip(beta + eta (EMA(E[N]) - target), 0, max_price); returns beta and the moving average."""
    mean = expected_length if mean is None else MEAN_LENGTH_EMA * mean + (1 - MEAN_LENGTH_EMA) * expected_length
    return min(max(beta + step_size * (mean - target), 0.0), max_price), mean


def straight_through_slots(
    a: Float[Tensor, "B K"], N: Int[Tensor, " B"], stop_position: StopPosition = "after"
) -> tuple[Bool[Tensor, "B K"], Float[Tensor, "B K"]]:
    """Eq. VL21: mark the first N positions, and return their bias log s_t - sg(log s_t), whose value is 0."""
    valid = first_slots_mask(N, a.shape[1])
    log_s = log_survival_gate(a, stop_position).masked_fill(~valid, 0.0)
    return valid, log_s - log_s.detach()
