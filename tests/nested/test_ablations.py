"""Ablations: weights are shared, the disabled part stays at its start, its contribution is a difference of losses."""

from typing import Any

import pytest
import torch

from laconic.errors import UsageError
from laconic.nested.ablations import build_ablations, freeze_levels
from laconic.nested.cms.layer import require_levels
from laconic.nested.cms.level import to_dense
from laconic.nested.memory_metrics import group_gates
from tests.nested.test_hope_model import (
    MEMORY,
    all_levels,
    build_attention,
    build_hope,
    build_titans,
    random_ids,
    read,
)

pytestmark = pytest.mark.usefixtures("unchecked")


def level_has_changed(level: Any) -> bool:
    return any(bool(to_dense(x).any()) for x in level.change.values())


@pytest.mark.parametrize("objective", ["task", "associative"])
def test_freeze_levels_freezes_only_these_levels(objective: str) -> None:
    for model in (build_hope(objective), build_attention(objective)):
        ids = random_ids(2, 9)
        for frozen in (0, 1):
            ablated = freeze_levels(model, frozen)
            _, state = read(ablated, ids)
            for n, layer in enumerate(state.layers):
                for C, level in zip(model.hope_config.chunk_sizes[n], require_levels(layer), strict=True):
                    assert level_has_changed(level) is ((2, 4)[frozen] != C)
        name = "model.layers.0.mlp.levels.0.up_proj.weight"
        assert ablated.get_parameter(name) is model.get_parameter(name)
    with pytest.raises(UsageError, match="level 2"):
        freeze_levels(model, 2)


def changed_parts(state: Any) -> tuple[bool, set[str]]:
    """Return whether any level has changed, and which memories have."""
    memories = {name for layer in state.layers for name, part in layer.memory.items() if bool(part.change.any())}
    return any(level_has_changed(level) for level in all_levels(state)), memories


@pytest.mark.medium
def test_build_ablations_disables_one_part_at_a_time() -> None:
    without = ["without chunk 2", "without chunk 4", "without levels"]
    model, ids = build_hope("associative"), random_ids(1, 6)
    ablations = build_ablations(model)
    static = [f"static {name}" for name in ("k", "v", "step", "keep", "projections")]
    assert [*ablations] == [*without, "without decay", "without erase", *static]
    results = {name: read(ablated, ids) for name, ablated in {"whole": model, **ablations}.items()}
    assert len({round(float(y.sum()), 9) for y, _ in results.values()}) == len(results)
    assert changed_parts(results["whole"][1]) == (True, {"memory", "projections"})
    assert changed_parts(results["without levels"][1]) == (False, {"memory", "projections"})
    assert changed_parts(results["static projections"][1]) == (True, {"memory"})
    for ablated in ablations.values():
        name = "model.layers.0.memory.memory.M"
        assert ablated.get_parameter(name) is model.get_parameter(name)
    options = {"momentum": True, "max_projection_norm": 0.0, "adaptive_projections": ("k",)}
    ablations = build_ablations(build_hope("associative", MEMORY.model_copy(update=options)))
    assert [*ablations] == [*without, "without momentum", "without decay", "without erase", "static projections"]
    memory: Any = ablations["without momentum"].initial_state(1).layers[0].memory["memory"]
    assert memory.momentum is None
    assert [*build_ablations(build_attention("associative"))] == without
    assert [*build_ablations(build_titans("associative"))] == [*without, "without momentum", "without decay"]


def test_build_ablations_fixes_the_gates_of_a_disabled_part() -> None:
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)).double()
    for model in (build_hope("associative"), build_titans("associative")):
        for name, ablated in {"whole": model, **build_ablations(model)}.items():
            memory: Any = ablated.get_submodule("model.layers.0.memory")
            for group, gates in group_gates(memory, ablated.initial_state(1).layers[0], x).items():
                assert bool((gates.decay == 1).all()) == (name == "without decay" and group != "projections")
                assert bool((gates.step_size == 0).all()) == (name == "static projections" and group == "projections")
