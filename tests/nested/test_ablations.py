"""A part's worth: what is lost without it, measured on models in which it matters or does not."""

from typing import Any

import pytest
import torch

from laconic.errors import UsageError
from laconic.nested.ablations import build_ablations, freeze_levels, measure_level_contribution
from laconic.nested.cms.forward import require_levels
from laconic.nested.cms.low_rank_updates import to_dense
from laconic.nested.language_model import NestedLanguageModel
from laconic.nested.metrics import group_gates
from tests.nested.test_hope_model import MEMORY, attention, hope, ids_of, read, titans
from tests.nested.test_learner import documents

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("inner", ["task", "associative"])
def test_a_frozen_level_alone_does_not_move(inner: str) -> None:
    for model in (hope(inner), attention(inner)):
        ids = ids_of(2, 9)
        for level in (0, 1):
            still = freeze_levels(model, level)
            _, state = read(still, ids)
            for n, layer in enumerate(state.layers):
                for chunk, held in zip(model.hope_config.chunk_sizes[n], require_levels(layer), strict=True):
                    moved = any(bool(to_dense(x).any()) for x in held.change.values())
                    assert moved == (chunk != (2, 4)[level])
        name = "model.layers.0.mlp.levels.0.up_proj.weight"
        assert still.get_parameter(name) is model.get_parameter(name)
    with pytest.raises(UsageError, match=r"level 2 was asked for; there are levels 0 to 1, of chunks \[2, 4\]"):
        freeze_levels(model, 2)


def test_worth_is_the_difference_of_nats() -> None:
    model, batches = hope("associative"), [documents(ids_of(2, 9)), documents(ids_of(1, 6, 1))]
    asked, tokens = 0.0, 0.0
    for batch in batches:
        with torch.no_grad():
            lost = NestedLanguageModel(freeze_levels(model, 0))(batch).loss - NestedLanguageModel(model)(batch).loss
        asked, tokens = asked + float(lost) * (batch.num_tokens - batch.B), tokens + batch.num_tokens - batch.B
    assert measure_level_contribution(model, 0, batches) == pytest.approx(asked / tokens)
    assert measure_level_contribution(model, 0, batches) != 0
    assert measure_level_contribution(hope("associative", eta=0.0), 0, batches) == 0


def moved(state: Any) -> tuple[bool, set[str]]:
    """Whether any level has moved, and which memories."""
    levels = [to_dense(x) for layer in state.layers for held in require_levels(layer) for x in held.change.values()]
    memories = {name for layer in state.layers for name, part in layer.memory.items() if bool(part.now.any())}
    return any(bool(x.any()) for x in levels), memories


def test_parts_are_taken_out_one_at_a_time() -> None:
    """Weights are shared, what is out stands still, and every row says something else."""
    without = ["without chunk 2", "without chunk 4", "without levels"]
    model, ids = hope("associative"), ids_of(1, 9)
    parts = build_ablations(model)
    projections = [f"static {name}" for name in ("k", "v", "step", "keep", "projections")]
    assert [*parts] == [*without, "without decay", "without erase", *projections]
    said = {name: read(part, ids) for name, part in {"whole": model, **parts}.items()}
    assert len({round(float(y.sum()), 9) for y, _ in said.values()}) == len(said)
    assert moved(said["whole"][1]) == (True, {"memory", "projections"})
    assert moved(said["without levels"][1]) == (False, {"memory", "projections"})
    assert moved(said["static projections"][1]) == (True, {"memory"})
    for part in parts.values():
        name = "model.layers.0.memory.memory.M"
        assert part.get_parameter(name) is model.get_parameter(name)
    with_momentum = hope("associative", MEMORY.model_copy(update={"momentum": True, "cap": 0.0, "inner": ("k",)}))
    names = [*build_ablations(with_momentum)]
    assert names == [*without, "without momentum", "without decay", "without erase", "static projections"]
    held: Any = build_ablations(with_momentum)["without momentum"].initial_state(1).layers[0].memory["memory"]
    assert held.momentum is None
    assert [*build_ablations(attention("associative"))] == without
    assert [*build_ablations(titans("associative"))] == [*without, "without momentum", "without decay"]


def test_gates_are_where_a_part_is_out() -> None:
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)).double()
    for model in (hope("associative"), titans("associative")):
        parts = build_ablations(model)
        for name, part in {"whole": model, **parts}.items():
            memory: Any = part.get_submodule("model.layers.0.memory")
            for group, gates in group_gates(memory, part.initial_state(1).layers[0], x).items():
                assert bool((gates.decay == 1).all()) == (name == "without decay" and group != "projections")
                assert bool((gates.step_size == 0).all()) == (name == "static projections" and group == "projections")
