"""The one table of tolerances; a test takes its number from here. Errors are relative L2 unless a line says else."""

import torch
from torch import Tensor

ORACLE = 1e-12  # float64: an equation against its loops, a law of the decoder against itself; of the largest magnitude
MEMORY = 1e-10  # float64: a memory read by chunks against token by token, in pieces against at once, gradients too
FLOORS = 10.0  # float32 parity and laws, in units of the measured float32 noise floor
LEAST_FLOOR = 1e-7  # no floor is taken smaller than this
QUIET = 1e-6  # below this root mean square of the reference, errors are absolute ...
QUIET_ABSOLUTE = 1e-7  # ... and at most this
FLOAT32 = 1e-5  # float32 between implementations: a saved folder in transformers, an adapter merged or carried over
BACKENDS = 2e-5  # float32: sdpa, flex and eager at live rows; ten times the floor seen at the logits
RECOMPUTE = 1e-6  # gradients with activation checkpointing against those without
SHIFT_PER_POSITION = 2.0**-20  # RoPE of default type, a constant added to all positions: the tables are float32
TABLE_PER_POSITION = 2.0**-21  # RoPE tables against their float64 oracle, absolute: a * (p * this + TABLE_BASE)
TABLE_BASE = 1e-7
LOW_RATIO_MEDIAN, LOW_RATIO_WORST, LOW_RATIO_LARGEST, LOW_RATIO_KL = 1.5, 3.0, 5.0, 1.5  # bf16, fp16: ours / reference


def error(got: Tensor, asked: Tensor) -> float:
    """Relative L2 distance in float64; the plain norm of `got` where `asked` is zero."""
    got, asked = got.detach().to(torch.float64), asked.detach().to(torch.float64)
    assert got.shape == asked.shape, f"shapes differ: {tuple(got.shape)} and {tuple(asked.shape)}"
    size = asked.norm().item()
    return (got - asked).norm().item() / (size or 1.0)


def largest(got: Tensor, asked: Tensor) -> float:
    """Largest absolute difference over the largest magnitude of `asked`, in float64."""
    got, asked = got.detach().to(torch.float64), asked.detach().to(torch.float64)
    assert got.shape == asked.shape, f"shapes differ: {tuple(got.shape)} and {tuple(asked.shape)}"
    if asked.numel() == 0:
        return 0.0
    return (got - asked).abs().max().item() / (asked.abs().max().item() or 1.0)
