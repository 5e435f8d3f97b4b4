"""AdamW with decay where it belongs, and the learning rate as a function of the step.

Decoupled weight decay: arXiv:1711.05101. Warm-up and decay are Hugging Face's: update 0 of a warm-up has rate 0.
"""

import math

import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.errors import UsageError


def build_adamw(method: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over what is trained, matrices with decay and all else (norms, biases, single vectors) without."""
    trained = [p for p in method.parameters() if p.requires_grad]
    if not trained:
        raise UsageError(f"train: what = {config.trainable} leaves no parameter to train; unfreeze some")
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.learning_rate, betas=config.betas, eps=config.eps
    )


def learning_rate_at(config: TrainingConfig, step: int, num_steps: int) -> float:
    """The learning rate of update `step`, counted from 0, of `steps`."""
    rising = config.num_warmup_updates(num_steps)
    if step < rising:
        return config.learning_rate * step / rising
    gone = (step - rising) / max(1, num_steps - rising)
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * gone)), "linear": 1 - gone, "constant": 1.0}[config.lr_schedule]
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * max(0.0, left))
