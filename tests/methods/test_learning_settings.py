"""Options of memories that learn: one source for layers and recipes, which TOML can say whole."""

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from laconic.config.nested import (
    CMSConfig,
    CMSOptions,
    InnerLoopConfig,
    MixerConfig,
    SelfModifyingOptions,
    TitansOptions,
)
from laconic.errors import UsageError
from laconic.nested.init import half_life_bias


def test_layers_take_what_recipes_say() -> None:
    assert SelfModifyingOptions is SelfModifyingOptions
    assert TitansOptions is TitansOptions
    assert CMSOptions is CMSOptions
    assert MixerConfig().options == SelfModifyingOptions()
    assert MixerConfig(kind="titans").options == TitansOptions()
    assert MixerConfig(kind="attention").options is None
    assert CMSConfig(chunk_sizes=(4, 8), inner_lr=0.5, inner_objective="associative").options == CMSOptions(
        inner_lr=0.5, inner_objective="associative"
    )


def test_no_torch_is_imported() -> None:
    asked = "import sys, laconic.config.nested; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


@pytest.mark.parametrize(
    "table",
    [
        MixerConfig(
            num_heads=2,
            self_modifying=SelfModifyingOptions(max_projection_norm=0.0, momentum=True, adaptive_projections=("k",)),
            titans=TitansOptions(max_memory_norm=0.0),
        ),
        CMSConfig(chunk_sizes=(2, 4), max_update_ratio=0.0, max_error_norm=0.0, inner_lr=0.0, donor_map=(0, 1)),
        InnerLoopConfig(outer_gradient="truncated", truncate_after=2),
    ],
)
def test_what_is_said_without_nothing_is_the_same(table: Any) -> None:
    said = json.dumps(table.model_dump(mode="json", exclude_none=True))  # as a resolved recipe is written
    assert type(table).model_validate_json(said) == table


def test_every_option_is_described() -> None:
    for table in (SelfModifyingOptions, TitansOptions, CMSOptions, MixerConfig, CMSConfig, InnerLoopConfig):
        assert all(field.description for field in table.model_fields.values())


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            lambda: MixerConfig(self_modifying=SelfModifyingOptions(decay_half_life=1e9)),
            r"keep_half_life 1e\+09 lets nothing go in float32, and the cap then lets nothing be written; take cap=0",
        ),
        (
            lambda: MixerConfig(self_modifying=SelfModifyingOptions(memory_chunk_size=48)),
            "self: chunks 48 and 64; one divides the other",
        ),
        (
            lambda: MixerConfig(kind="titans", chunk_size=0),
            "titans: chunk 0 was asked for; a chunk has at least 1 token",
        ),
        (
            lambda: CMSConfig(chunk_sizes=(4, 6)),
            "chunk 4 does not divide 6, the next; chunks ascend, each divides the next",
        ),
        (lambda: CMSConfig(chunk_sizes=()), r"chunks \[\]; give one a level, each of at least 1 token"),
        (lambda: InnerLoopConfig(outer_gradient="truncated"), "horizon None: gradient truncated has one, others none"),
        (lambda: InnerLoopConfig(truncate_after=3), "horizon 3: gradient truncated has one, others none"),
    ],
)
def test_tables_that_cannot_be_meant_are_refused(table: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        table()


@pytest.mark.parametrize("tokens", [0.0, float("inf")])
def test_a_half_life_is_tokens(tokens: float) -> None:
    with pytest.raises(UsageError, match="a half-life is a number of tokens, above 0 and finite"):
        half_life_bias(tokens)
