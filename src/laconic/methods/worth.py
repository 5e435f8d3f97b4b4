"""What a level is worth: the nats that are lost where it stays at its start.

Nested Learning arXiv:2512.24695, Table 6. Levels are numbered by their chunks, the fastest 0, over all layers.
"""

from collections.abc import Iterable

import torch

from laconic.core.contract import Documents
from laconic.methods.ablations import frozen
from laconic.methods.hope_model import Hope
from laconic.methods.learner import Learner
from laconic.methods.learning_settings import Learning


@torch.no_grad()
def worth(model: Hope, level: int, batches: Iterable[Documents], learning: Learning | None = None) -> float:
    """Nats per scored token that are lost where a level is frozen at its start; every batch is read from the start."""
    whole, without = Learner(model, learning), Learner(frozen(model, level), learning)
    lost, tokens = 0.0, 0.0
    for batch in batches:
        scored = whole.totals(batch)["scored"]
        lost += float(without(batch).loss - whole(batch).loss) * scored
        tokens += scored
    return lost / (tokens or 1.0)
