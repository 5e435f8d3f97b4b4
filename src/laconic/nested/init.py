"""Initial values of memory parameters: random matrices, and biases that give a gate a chosen value."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

INITIAL_MOMENTUM = 0.5  # momentum coefficient of memories at initialisation


def sample_normal(generator: torch.Generator, *shape: int, std: float) -> Tensor:
    return torch.randn(*shape, generator=generator) * std


def half_life_bias(tokens: float) -> float:
    """Return the bias b at which sigmoid(b) halves a write after that many tokens: -ln(2^(1/tokens) - 1)."""
    return -math.log(math.expm1(math.log(2) / tokens))


def softplus_inverse(value: float) -> float:
    """Return the bias b with softplus(b) = value; above 30 the two are equal in float64."""
    return value if value > 30 else math.log(math.expm1(value))


def logit(probability: float) -> float:
    """Return the bias b with sigmoid(b) = probability."""
    return math.log(probability / (1 - probability))


def register_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Register each tensor as a parameter; `norm.weight` becomes the weight of a submodule `norm`."""
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        owner = module
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(last, nn.Parameter(tensor))
