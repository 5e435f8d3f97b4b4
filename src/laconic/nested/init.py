"""How the weights of memories begin: draws by a generator of their own, and biases that set a gate."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from laconic.errors import UsageError


def sample_normal(generator: torch.Generator, *shape: int, std: float) -> Tensor:
    """Normal numbers of that standard deviation."""
    return torch.randn(*shape, generator=generator) * std


def half_life_bias(tokens: float) -> float:
    """The bias at which a sigmoid keeps half of a write after that many tokens: -ln(2^(1/h) - 1)."""
    if not 0 < tokens < math.inf:
        raise UsageError(f"keep_half_life {tokens}: a half-life is a number of tokens, above 0 and finite")
    return -math.log(math.expm1(math.log(2) / tokens))


def softplus_inverse(value: float) -> float:
    """The bias at which a softplus is that size; beyond 30 it is its own."""
    return value if value > 30 else math.log(math.expm1(value))


def logit(probability: float, name: str) -> float:
    """The bias at which a sigmoid is that share. Raises `Usage` (2) for what is no share."""
    if not 0 < probability < 1:
        raise UsageError(f"{name} {probability}: between 0 and 1 of its largest value, both left out")
    return math.log(probability / (1 - probability))


def register_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Each tensor as a parameter under its name, `norm.weight` in a module called norm."""
    for name, tensor in tensors.items():
        *rooms, inner = name.split(".")
        place = module
        for room in rooms:
            if room not in dict(place.named_children()):
                place.add_module(room, nn.Module())
            place = place.get_submodule(room)
        place.register_parameter(inner, nn.Parameter(tensor))
