"""What a level is worth: the nats that are lost where it stays at its start.

Nested Learning arXiv:2512.24695, Table 6. Levels are numbered by their chunks, the fastest 0, over all layers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from laconic.core.contract import Documents
from laconic.core.errors import Usage
from laconic.methods.cms_layer import STILL
from laconic.methods.hope_model import Hope
from laconic.methods.learner import Learner
from laconic.methods.learning_settings import Learning
from laconic.methods.telemetry import chunks_of


def frozen(model: Hope, level: int) -> Hope:
    """The same model, its tensors shared, in which a level never moves: its steps are 0.

    A state that is read on may hold changes of that level, which then stay; begin anew, or reset it. Raises `Usage` (2)
    for a level there is not.
    """
    chunks = chunks_of(model)
    if not 0 <= level < len(chunks):
        raise Usage(f"level {level} was asked for; there are levels 0 to {len(chunks) - 1}, of chunks {list(chunks)}")
    with torch.device("meta"):
        made = type(model)(model.shape, seed=None)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for n, own in enumerate(model.shape.chunks):
        for l in (l for l, C in enumerate(own) if chunks[level] == C):
            name = f"{model.names.blocks}.{n}.mlp.levels.{l}.step.bias"
            tensors[name] = nn.Parameter(torch.full_like(tensors[name], STILL))
    made.load_state_dict({name: tensors[name] for name in made.state_dict()}, assign=True)
    made.folder, made.name_or_path, made.attention = model.folder, model.name_or_path, model.attention
    return made.train(model.training)


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
