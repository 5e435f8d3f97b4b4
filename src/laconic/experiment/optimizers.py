"""Build the optimizer of a recipe: AdamW, M3, or DGD (the last two from Nested Learning, arXiv:2512.24695)."""

from typing import Any

import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.errors import UsageError
from laconic.nested.optim.dgd import DGD
from laconic.nested.optim.input_recording import record_inputs
from laconic.nested.optim.m3 import M3
from laconic.training.optim import build_adamw


def build_optimizer(method: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters.

    M3 and DGD update matrices; AdamW updates all other parameters, and with M3 also embeddings and output head. With M3
    only the matrices it updates have weight decay.

    Raises:
        UsageError: For weight decay with DGD.
    """
    if config.optimizer == "adamw":
        return build_adamw(method, config)
    adam: dict[str, Any] = {"adam_betas": config.betas, "adam_weight_decay": 0.0}
    if config.optimizer == "m3":
        return M3(M3.build_param_groups(method), config.learning_rate, weight_decay=config.weight_decay, **adam)
    if config.weight_decay:
        raise UsageError(f"train.weight_decay {config.weight_decay}: dgd has a decay of its own; remove the key")
    named = [(name, p) for name, p in record_inputs(method).named_parameters() if p.requires_grad]
    return DGD(named, config.learning_rate, adam_lr=config.learning_rate, **adam)
