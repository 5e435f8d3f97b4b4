"""Tables of methods and nested models: the same option objects for layers and recipes, and invalid combinations."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from laconic.config.config_model import drop_former_options
from laconic.config.methods import LatentConfig
from laconic.config.nested import (
    CMSConfig,
    CMSOptions,
    InnerLoopConfig,
    MixerConfig,
    SelfModifyingOptions,
    TitansOptions,
)


def test_latent_config_iterations_belong_to_the_jacobi_schedule() -> None:
    with pytest.raises(ValidationError, match="jacobi_iterations 3"):
        LatentConfig(schedule="sequential", jacobi_iterations=3)
    with pytest.raises(ValidationError, match='length_policy "stop_head": needs Jacobi iterations'):
        LatentConfig(schedule="sequential", length_policy="stop_head")
    assert LatentConfig(schedule="jacobi", jacobi_iterations=0).jacobi_iterations == 0
    assert LatentConfig(schedule="sequential").jacobi_iterations is None


@pytest.mark.parametrize(
    "changes",
    [{"num_latents": 0}, {"jacobi_iterations": -1}, {"projection": "linear"}, {"jacobi_iterations": "3"}, {"more": 1}],
)
def test_config_model_is_strict(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LatentConfig.model_validate({"jacobi_iterations": 3} | changes)


def test_options_of_tables_are_those_of_the_layers() -> None:
    assert MixerConfig().options == SelfModifyingOptions()
    assert MixerConfig(kind="titans").options == TitansOptions()
    assert MixerConfig(kind="attention").options is None
    config = CMSConfig(chunk_sizes=(4, 8), inner_lr=0.5, inner_objective="associative")
    assert config.options == CMSOptions(inner_lr=0.5, inner_objective="associative")


@pytest.mark.parametrize(
    "table",
    [
        MixerConfig(
            num_heads=2,
            self_modifying=SelfModifyingOptions(max_projection_norm=0.0, momentum=True, adaptive_projections=("k",)),
            titans=TitansOptions(max_memory_norm=0.0),
        ),
        CMSConfig(chunk_sizes=(2, 4), max_update_ratio=0.0, max_error_norm=0.0, inner_lr=0.0),
        InnerLoopConfig(outer_gradient="truncated", truncate_after=2),
    ],
)
def test_tables_without_none_are_equal_when_loaded_again(table: Any) -> None:
    text = json.dumps(table.model_dump(mode="json", exclude_none=True))  # as in a resolved recipe
    assert type(table).model_validate_json(text) == table


def test_former_options_are_dropped_if_they_have_their_default() -> None:
    stored = {"cms": {"donor_map": None, "inner_lr": 0.1}, "mixer": {"titans": {"max_lr": 1.5}}}
    assert drop_former_options(stored) == {"cms": {"inner_lr": 0.1}, "mixer": {"titans": {"max_lr": 1.5}}}
    compression = {"carry_between_windows": "soft", "bos": None}
    assert drop_former_options({"compression": compression, "stop_head": {"joint_training": False}}) == {
        "compression": compression, "stop_head": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelfModifyingOptions(decay_half_life=1e9), "decay_half_life"),
        (lambda: SelfModifyingOptions(memory_chunk_size=48), "48 and 64"),
        (lambda: MixerConfig(kind="titans", chunk_size=0), "chunk_size"),
        (lambda: InnerLoopConfig(outer_gradient="truncated"), "truncate_after None"),
        (lambda: InnerLoopConfig(truncate_after=3), "truncate_after 3"),
        (lambda: CMSConfig(chunk_sizes=(4, 6)), "4 must divide 6"),
        (lambda: CMSConfig(chunk_sizes=()), "at least 1 token"),
    ],
)
def test_tables_refuse_invalid_combinations(make: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make()
