"""Temporary evaluation mode of modules."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def eval_no_grad(*modules: nn.Module) -> Generator[None]:
    """Disable gradients and dropout; afterwards every submodule is in the mode it was in."""
    training = [part for module in modules for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
