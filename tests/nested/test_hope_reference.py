"""Hope equals its reference: the loss of a training step and the gradient of every weight."""

from typing import Any

import pytest
import torch

from laconic.batches import DocumentBatch
from laconic.config.nested import InnerLoopConfig
from laconic.nested.hope.hope_reference import hope_training_loss
from laconic.nested.language_model import NestedLanguageModel
from tests.nested.helpers import assert_close
from tests.nested.test_hope_model import MEMORY, build_hope, random_ids

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("memory", "cms"),
    [
        ({}, {}), ({"max_memory_norm": 0.2, "max_projection_norm": 0.3}, {"max_update_ratio": 0.05}),
        ({"objective": "l2", "decay_target": "zero", "read_at": "after"}, {"residual": "plain"}),
        ({"adaptive_projections": ("k", "step"), "read_at": "boundary", "delta_rule": False}, {"inner_lr": 2.0}),
    ],
)  # fmt: skip
def test_hope_equals_its_reference(memory: dict[str, Any], cms: dict[str, Any]) -> None:
    model, ids = build_hope("task", MEMORY.model_copy(update=memory), **cms), random_ids(2, 7)
    mask = torch.ones(ids.shape, dtype=torch.bool)
    batch = DocumentBatch(ids, mask, mask, (ids.shape[1],), torch.arange(len(ids)))
    loss = NestedLanguageModel(model, InnerLoopConfig(outer_gradient="full"))(batch).loss
    expected = hope_training_loss(model, ids)
    assert_close([loss], [expected])
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(x, parameters, materialize_grads=True) for x in (loss, expected)]
    assert_close(*gradients)
