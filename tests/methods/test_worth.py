"""A level's worth: what is lost where it stays at its start, measured on models whose level matters or does not."""

import pytest
import torch

from laconic.core.errors import Usage
from laconic.methods.changes import dense
from laconic.methods.cms_reading import levels_of
from laconic.methods.learner import Learner
from laconic.methods.worth import frozen, worth
from tests.methods.test_hope_model import attention, hope, ids_of, read
from tests.methods.test_learner import documents

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("inner", ["task", "associative"])
def test_a_frozen_level_alone_does_not_move(inner: str) -> None:
    for model in (hope(inner), attention(inner)):
        ids = ids_of(2, 9)
        for level in (0, 1):
            still = frozen(model, level)
            _, state = read(still, ids)
            for n, layer in enumerate(state.layers):
                for chunk, held in zip(model.shape.chunks[n], levels_of(layer), strict=True):
                    moved = any(bool(dense(x).any()) for x in held.moved.values())
                    assert moved == (chunk != (2, 4)[level])
        name = "model.layers.0.mlp.levels.0.up_proj.weight"
        assert still.get_parameter(name) is model.get_parameter(name)
    with pytest.raises(Usage, match=r"level 2 was asked for; there are levels 0 to 1, of chunks \[2, 4\]"):
        frozen(model, 2)


def test_worth_is_the_difference_of_nats() -> None:
    model, batches = hope("associative"), [documents(ids_of(2, 9)), documents(ids_of(1, 6, 1))]
    asked, tokens = 0.0, 0.0
    for batch in batches:
        with torch.no_grad():
            lost = Learner(frozen(model, 0))(batch).loss - Learner(model)(batch).loss
        asked, tokens = asked + float(lost) * (batch.tokens - batch.B), tokens + batch.tokens - batch.B
    assert worth(model, 0, batches) == pytest.approx(asked / tokens)
    assert worth(model, 0, batches) != 0
    assert worth(hope("associative", eta=0.0), 0, batches) == 0
