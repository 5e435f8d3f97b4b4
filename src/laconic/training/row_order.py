"""The rows of each update, as a pure function of seed and step."""

from typing import NamedTuple

import numpy as np

from laconic.config.training import TrainingConfig
from laconic.rng import permuted_index


class UpdateIndex(NamedTuple):
    """Number of an update, its epoch, and the rows of all ranks."""

    step: int
    epoch: int
    rows: tuple[int, ...]


def compute_update_index(config: TrainingConfig, seed: int, step: int, num_rows: int) -> UpdateIndex:
    """Return the rows of an update, a pure function of its arguments, so that resuming needs only the step.

    Stateful training reads the rows in order, so that each row continues where it was in the update before.
    """
    epoch, i = divmod(step, config.updates_per_epoch(num_rows))
    positions = np.arange(i * config.batch_size, min((i + 1) * config.batch_size, num_rows))
    rows = positions if config.stateful else permuted_index(seed, epoch, positions, num_rows)
    return UpdateIndex(step, epoch, tuple(rows.tolist()))
