"""The optimizer that a recipe names: AdamW, or a memory of gradients of Nested Learning (arXiv:2512.24695)."""

from typing import Any

import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.errors import UsageError
from laconic.nested.optim.dgd import DGD
from laconic.nested.optim.input_recording import record_inputs
from laconic.nested.optim.m3 import M3
from laconic.training.optim import build_adamw


def optimizer(method: nn.Module, how: TrainingConfig) -> torch.optim.Optimizer:
    """Over what is trained, all at one rate. M3 and DGD move matrices, AdamW what is none, tables and heads of M3 too.

    Only the matrices that M3 moves decay beside those of AdamW alone. Raises `Usage` (2) for a decay with DGD.
    """
    if how.optimizer == "adamw":
        return build_adamw(method, how)
    adam: dict[str, Any] = {"adam_betas": how.betas, "adam_decay": 0.0}
    if how.optimizer == "m3":
        return M3(M3.build_param_groups(method), how.learning_rate, decay=how.weight_decay, **adam)
    if how.weight_decay:
        raise UsageError(f"train.weight_decay {how.weight_decay} with dgd: its erasing is its decay; leave the key out")
    named = [(name, p) for name, p in record_inputs(method).named_parameters() if p.requires_grad]
    return DGD(named, how.learning_rate, adam_lr=how.learning_rate, **adam)
