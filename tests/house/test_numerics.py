"""docs/numerics.md: every recipe key it names exists, and the choices that recipes can switch are on the page."""

import re
from typing import Any

import pytest

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.config.recipe_keys import find_field, flatten
from laconic.errors import UsageError
from tests.conftest import REPO

PAGE = (REPO / "docs" / "numerics.md").read_text(encoding="utf-8")
# Recipe, key, our choice, and the other readings that the key selects.
SWITCHES: tuple[tuple[str, str, Any, tuple[str, ...]], ...] = (
    ("kava-llama1b-aug", "distillation.hidden_loss", "smooth_l1", ("l1", "mse")),
    ("kava-llama1b-aug", "distillation.hidden_layers", "blocks", ("all", "last")),
    ("kava-llama1b-aug", "distillation.hidden_scale", "layer", ("none", "global")),
    ("kava-llama1b-aug", "kv_distillation.scale", "layer", ("none", "global")),
    ("kava-llama1b-aug", "kv_distillation.distance", "smooth_l1", ("l1", "mse")),
    ("kava-llama1b-aug", "kv_distillation.key_space", "post_rope", ("pre_rope",)),
    ("kava-llama1b-aug", "kv_distillation.short_chain_targets", "mask", ("zero",)),
    ("kava-llama1b-aug", "distillation.teacher_pass", "same_pass", ("second_pass",)),
    ("kava-llama1b-aug", "latents.projection", "pccot", ("codi", "none")),
    ("kava-llama1b-aug", "lora.target_modules", "all", ("attention",)),
    ("kava-llama1b-aug", "data.format", "pccot", ("codi",)),
    ("kava-llama1b-aug", "data.require_leading_digit", False, ("true",)),
    ("kava-llama1b-aug", "data.max_tokens", None, ("200",)),
    ("cot-llama1b-aug", "data.chain_steps", "all", ("drop_last",)),
    ("codi-llama1b-aug", "data.separator", "none", ("eos",)),
    ("codi-gpt2-aug-nl", "data.chain_split", "sentences", ("lines",)),
    ("pccot-gpt2-aug", "train.warmup_ratio", 0.03, ("0.05",)),
    ("pccot-gpt2-aug", "train.max_grad_norm", 1.0, ("2.0",)),
    ("coconut-gpt2-aug", "coconut.pad_latent_to_max", True, ("false",)),
)


def value(recipe: Recipe, key: str) -> Any:
    return flatten(recipe.model_dump(mode="json")).get(key)


def test_every_recipe_key_on_the_page_exists() -> None:
    tables = "|".join(name for name in Recipe.model_fields if name not in ("method", "seed"))
    names = set(re.findall(rf"`((?:{tables})(?:\.[a-z_0-9]+)+)\b(?!\()", PAGE))
    assert len(names) > 20
    assert sorted(key for key in names if find_field(key) is None) == []


@pytest.mark.parametrize(("name", "key", "default", "others"), SWITCHES, ids=[key for _, key, _, _ in SWITCHES])
def test_recipe_key_selects_the_other_readings(name: str, key: str, default: Any, others: tuple[str, ...]) -> None:
    before = value(load_recipe(name)[0], key)
    assert before == default
    for other in others:
        after = value(load_recipe(name, [f"{key}={other}"])[0], key)
        assert str(after).lower() == other
        assert after != before
    last = key.rpartition(".")[2]
    assert f"`{key}" in PAGE or f"`{last}`" in PAGE or f"`{last} " in PAGE, f"{key} is missing on the page"


def test_sequential_schedule_refuses_iterations() -> None:
    with pytest.raises(UsageError, match=r"latents\.jacobi_iterations.*sequential"):
        load_recipe("kava-llama1b-aug", ["latents.schedule=sequential"])
