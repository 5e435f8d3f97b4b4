"""AdamW with decay where it belongs, and the learning rate as a function of the step.

Decoupled weight decay: arXiv:1711.05101. Warm-up and decay are Hugging Face's: update 0 of a warm-up has rate 0.
"""

import math

import torch
from torch import nn

from laconic.core.errors import Usage
from laconic.training.settings import Training


def adamw(method: nn.Module, how: Training) -> torch.optim.AdamW:
    """AdamW over what is trained, matrices with decay and all else (norms, biases, single vectors) without."""
    trained = [p for p in method.parameters() if p.requires_grad]
    if not trained:
        raise Usage(f"train: what = {how.what} leaves no parameter to train; unfreeze some")
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": how.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=how.lr, betas=how.betas, eps=how.eps)


def rate(how: Training, step: int, steps: int) -> float:
    """The learning rate of update `step`, counted from 0, of `steps`."""
    rising = how.rising(steps)
    if step < rising:
        return how.lr * step / rising
    gone = (step - rising) / max(1, steps - rising)
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * gone)), "linear": 1 - gone, "constant": 1.0}[how.schedule]
    return how.lr * (how.floor + (1 - how.floor) * max(0.0, left))
