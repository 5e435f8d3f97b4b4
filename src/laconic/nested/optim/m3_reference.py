"""Reference implementation of M3: the weights of one matrix after each of its gradients, from the whole history.

Nested Learning arXiv:2512.24695, Algorithm 1 (75), and a form of our own with running means (75e). Start reading here:
`m3.py` keeps running memories, and a test holds it to this file in float64. Here every memory is recomputed as a sum
over all gradients so far.

Symbols: g_1 .. g_n gradients; M1 fast and M2 slow memory, V squares; f gradients per slow update; NS Newton-Schulz.
"""

import math

import torch
from torch import Tensor

from laconic.nested.optim.m3_equations import M3Hyperparameters

Gradients = list[Tensor]


def newton_schulz(m: Tensor) -> Tensor:
    """Compute Eq. 44 without shortcuts: X <- a X + b (X X')X + c (X X')^2 X, from X = m / |m|."""
    x = m / (m.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


def m3_literal(weight: Tensor, gradients: Gradients, lr: float, h: M3Hyperparameters) -> Tensor:
    """Return the matrix after all gradients, by Algorithm 1 as printed."""
    b1, b2, b3 = h.betas
    for n in range(1, len(gradients) + 1):
        read = gradients[:n]
        M1 = b1 * torch.stack(read).sum(0)
        V = b2 * torch.stack([g.square() for g in read]).sum(0)
        complete = (n - 1) // h.slow_every * h.slow_every  # slow updates before this gradient
        slow = newton_schulz(b3 * torch.stack(read[:complete]).sum(0)) if complete else torch.zeros_like(weight)
        weight = weight - lr * (newton_schulz(M1) + h.alpha * slow) / (V.sqrt() + h.eps)
    return weight


def m3_ema(weight: Tensor, gradients: Gradients, lr: float, h: M3Hyperparameters, decay: float = 0.0) -> Tensor:
    """Return the matrix after all gradients, with running means of both memories (75e, not in the paper).

    Nothing is divided by V; instead 0.2 sqrt(longer side) and 1 / (1 + alpha) set the size of a step, as in Muon.
    """
    b1, _, b3 = h.betas
    for n in range(1, len(gradients) + 1):
        M1 = weighted_mean(gradients[:n], b1)
        num_slow = (n - 1) // h.slow_every
        slow = torch.zeros_like(weight)
        if num_slow:
            periods = [torch.stack(gradients[k * h.slow_every : (k + 1) * h.slow_every]) for k in range(num_slow)]
            slow = newton_schulz(weighted_mean([period.mean(0) for period in periods], b3))
        step = 0.2 * math.sqrt(max(weight.shape)) * (newton_schulz(M1) + h.alpha * slow) / (1 + h.alpha)
        weight = (1 - lr * decay) * weight - lr * step
    return weight


def weighted_mean(values: Gradients, beta: float) -> Tensor:
    """Return the exponentially weighted mean, whose weights beta^k sum to 1 (the bias correction of running means)."""
    weights = [beta ** (len(values) - 1 - k) for k in range(len(values))]
    return torch.stack([w * x for w, x in zip(weights, values, strict=True)]).sum(0) / sum(weights)
