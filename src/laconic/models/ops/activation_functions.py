"""Activation functions of the MLP, by the names that config.json files have: GELU (arXiv:1606.08415) and others."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU's tanh approximation (arXiv:1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Compute GELU's sigmoid approximation (arXiv:1606.08415, section 2)."""
    return x * torch.sigmoid(1.702 * x)


def clipped_gelu(x: Tensor) -> Tensor:
    """Compute GELU limited to [-10, 10] (arXiv:2004.09602)."""
    return F.gelu(x).clamp(-10, 10)


def squared_relu(x: Tensor) -> Tensor:
    """Compute the squared ReLU (arXiv:2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # the names of transformers, some of which differ in rounding
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_python_tanh": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_accurate": gelu_tanh,
    "gelu_10": clipped_gelu,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "linear": torch.clone,  # a copy, since the gated MLP multiplies the result in place
}
