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
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": squared_relu,
    "tanh": torch.tanh,
}
