"""Random initial values drawn from a generator of their own, independent of torch's global state."""

import torch
from torch import nn

NORMAL_STD = 0.02


def build_seeded_linear(in_features: int, out_features: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear map with torch's default distribution, uniform in ±1/√in_features."""
    linear, bound = nn.Linear(in_features, out_features, device="meta").to_empty(device="cpu"), in_features**-0.5
    with torch.no_grad():
        for p in linear.parameters():
            p.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) * bound)
    return linear
