"""AdamW with decoupled weight decay (arXiv:1711.05101) on matrices only."""

import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.errors import UsageError


def build_adamw(method: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; norms, biases and other vectors are not decayed."""
    trained = [p for p in method.parameters() if p.requires_grad]
    if not trained:
        raise UsageError(f'trainable = "{config.trainable}" leaves no parameter to train; choose another value')
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    is_mixed = len({type(p) for p in trained}) > 1  # sharded tensors and whole scalars do not go into one foreach call
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        foreach=False if is_mixed else None,
    )
