"""What a run trains, on what data, with which settings, and where."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.interfaces import TrainingData
from laconic.training.checkpoint import ModelIO
from laconic.training.optim import build_adamw
from laconic.training.ranks import Ranks
from laconic.training.step import OptimizerBuilder


@dataclass(frozen=True)
class TrainingSetup:
    """Everything that decides which updates a run makes.

    Attributes:
        method: Module that implements `Method`.
        data: Rows to train on.
        config: Steps, batch sizes, optimizer, checkpoints.
        seed: Seed of the order of rows and of all random numbers.
        model_io: Saves and loads the model of a step; by default all tensors of the method.
        fingerprints: SHA-256 of recipe and base weights, to which those of the data are added. Steps with other ones
            are not resumed.
        ranks: Processes that train together; by default this one alone.
        device: Device to train on.
        build_optimizer: Builds the optimizer of the trainable parameters.
    """

    method: nn.Module
    data: TrainingData
    config: TrainingConfig
    seed: int = 0
    model_io: ModelIO | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict[str, str])
    ranks: Ranks = field(default_factory=Ranks)
    device: torch.device | str = "cpu"
    build_optimizer: OptimizerBuilder = build_adamw
