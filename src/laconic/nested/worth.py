"""What a level is worth: the nats that are lost where it stays at its start.

Nested Learning arXiv:2512.24695, Table 6. Levels are numbered by their chunks, the fastest 0, over all layers.
"""

from collections.abc import Iterable

import torch

from laconic.batches import DocumentBatch
from laconic.config.nested import InnerLoopConfig
from laconic.nested.ablations import freeze_levels
from laconic.nested.hope.model import Hope
from laconic.nested.language_model import NestedLanguageModel


@torch.no_grad()
def measure_level_contribution(
    model: Hope, level: int, batches: Iterable[DocumentBatch], config: InnerLoopConfig | None = None
) -> float:
    """Nats per scored token that are lost where a level is frozen at its start; every batch is read from the start."""
    whole, without = NestedLanguageModel(model, config), NestedLanguageModel(freeze_levels(model, level), config)
    lost, tokens = 0.0, 0.0
    for batch in batches:
        scored = whole.loss_denominators(batch)["scored"]
        lost += float(without(batch).loss - whole(batch).loss) * scored
        tokens += scored
    return lost / (tokens or 1.0)
