"""Tolerances of all tests. Errors are relative L2 unless a line says otherwise."""

import torch
from torch import Tensor

ORACLE = 1e-12  # float64: equations against loop oracles, properties of the decoder; relative to the largest magnitude
MEMORY = 1e-10  # float64: memories in chunks against one token at a time, short forms of thinking; and their gradients
FLOORS = 10.0  # float32 parity, in units of the measured float32 error
LEAST_FLOOR = 1e-7  # lower bound of the float32 error
QUIET = 1e-6  # below this root mean square of the reference, errors are absolute
QUIET_ABSOLUTE = 1e-7  # bound of those absolute errors
FLOAT32 = 1e-5  # float32 between implementations, such as transformers or a merged adapter
BACKENDS = 2e-5  # float32: sdpa, flex and eager attention; ten times the error seen at the logits
RECOMPUTE = 1e-6  # gradients with activation checkpointing against those without
SHIFT_PER_POSITION = 2.0**-20  # default RoPE with a constant added to all positions: its tables are float32
TABLE_PER_POSITION = 2.0**-21  # RoPE tables against their float64 oracle, absolute: a * (p * this + TABLE_BASE)
TABLE_BASE = 1e-7
LOW_RATIO_MEDIAN, LOW_RATIO_WORST, LOW_RATIO_LARGEST, LOW_RATIO_KL = 1.5, 3.0, 5.0, 1.5  # bf16, fp16: ours / reference


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 distance in float64; the plain norm of `actual` where `expected` is zero."""
    actual, expected = actual.detach().to(torch.float64), expected.detach().to(torch.float64)
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    size = expected.norm().item()
    return (actual - expected).norm().item() / (size or 1.0)


def largest(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest magnitude of `expected`, in float64."""
    actual, expected = actual.detach().to(torch.float64), expected.detach().to(torch.float64)
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    return (actual - expected).abs().max().item() / (expected.abs().max().item() or 1.0)
