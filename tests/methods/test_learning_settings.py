"""Options of memories that learn: one source for layers and recipes, which TOML can say whole."""

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from laconic.core.errors import Usage
from laconic.methods import cms_shape, hope_shape, titans_shape
from laconic.methods.learning_settings import (
    ContinuumOptions,
    Learning,
    Levels,
    Memory,
    SelfTitansOptions,
    TitansOptions,
)
from laconic.methods.starts import half_life


def test_layers_take_what_recipes_say() -> None:
    assert hope_shape.Options is SelfTitansOptions
    assert titans_shape.Options is TitansOptions
    assert cms_shape.Options is ContinuumOptions
    assert Memory().options == SelfTitansOptions()
    assert Memory(mixer="titans").options == TitansOptions()
    assert Memory(mixer="attention").options is None
    assert Levels(chunks=(4, 8), eta=0.5, inner="associative").options == ContinuumOptions(eta=0.5, inner="associative")


def test_no_torch_is_imported() -> None:
    asked = "import sys, laconic.methods.learning_settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0


@pytest.mark.parametrize(
    "table",
    [
        Memory(heads=2, self=SelfTitansOptions(cap=0.0, momentum=True, inner=("k",)), titans=TitansOptions(guard=0.0)),
        Levels(chunks=(2, 4), clip=0.0, clip_error=0.0, eta=0.0, map=(0, 1)),
        Learning(gradient="truncated", horizon=2),
    ],
)
def test_what_is_said_without_nothing_is_the_same(table: Any) -> None:
    said = json.dumps(table.model_dump(mode="json", exclude_none=True))  # as a resolved recipe is written
    assert type(table).model_validate_json(said) == table


def test_every_option_is_described() -> None:
    for table in (SelfTitansOptions, TitansOptions, ContinuumOptions, Memory, Levels, Learning):
        assert all(field.description for field in table.model_fields.values())


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (
            lambda: Memory(self=SelfTitansOptions(keep_half_life=1e9)),
            r"keep_half_life 1e\+09 lets nothing go in float32, and the cap then lets nothing be written; take cap=0",
        ),
        (lambda: Memory(self=SelfTitansOptions(chunk_memory=48)), "self: chunks 48 and 64; one divides the other"),
        (lambda: Memory(mixer="titans", chunk=0), "titans: chunk 0 was asked for; a chunk has at least 1 token"),
        (lambda: Levels(chunks=(4, 6)), "chunk 4 does not divide 6, the next; chunks ascend, each divides the next"),
        (lambda: Levels(chunks=()), r"chunks \[\]; give one a level, each of at least 1 token"),
        (lambda: Learning(gradient="truncated"), "horizon None: gradient truncated has one, others none"),
        (lambda: Learning(horizon=3), "horizon 3: gradient truncated has one, others none"),
    ],
)
def test_tables_that_cannot_be_meant_are_refused(table: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        table()


@pytest.mark.parametrize("tokens", [0.0, float("inf")])
def test_a_half_life_is_tokens(tokens: float) -> None:
    with pytest.raises(Usage, match="a half-life is a number of tokens, above 0 and finite"):
        half_life(tokens)
