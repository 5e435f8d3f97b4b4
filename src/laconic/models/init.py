"""Modules of a decoder under their checkpoint names, and initial values that do not depend on torch's global state."""

from collections.abc import Mapping

import torch
from torch import nn

NORMAL_STD = 0.02


class Namespace(nn.Module):
    """Empty module used as a namespace."""


def add_submodule(root: nn.Module, path: str | None, module: nn.Module) -> None:
    """Add `module` at a dotted path, creating namespaces on the way. A path of None means the family has none."""
    if path is None:
        return
    *parents, last = path.split(".")
    for name in parents:
        if not hasattr(root, name):
            root.add_module(name, Namespace())
        root = root.get_submodule(name)
    root.add_module(last, module)


def build_seeded_linear(in_features: int, out_features: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear map with torch's default distribution, uniform in ±1/√in_features."""
    linear = nn.Linear(in_features, out_features, device="meta").to_empty(device="cpu")
    bound = in_features**-0.5
    with torch.no_grad():
        for p in linear.parameters():
            p.copy_((torch.rand(p.shape, generator=generator) * 2 - 1) * bound)
    return linear


def init_parameters(parameters: Mapping[str, nn.Parameter], std: float, seed: int) -> None:
    """Initialise parameters in place: matrices normal(0, std), vectors 1, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in parameters.items():
            if p.ndim == 2:
                p.copy_(torch.randn(p.shape, generator=generator, device="cpu") * std)
            else:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
