"""Recipe keys in which a run differs from the row of the paper that its recipe reproduces."""

from pathlib import Path

import pytest
from torch import nn

from laconic.config.load import load_recipe, to_toml
from laconic.evaluation.report.papers import recipe_differences, shipped_recipes
from laconic.training.optim import build_adamw


def test_recipe_differences_of_overrides(tmp_path: Path) -> None:
    keys = ("latents.num_latents=12", "train.epochs=1", "seed=2", "train.log_every=5")
    recipe = load_recipe("kava-llama1b-aug", keys)[0]
    assert recipe_differences(recipe) == ["latents.num_latents", "train.epochs"]
    (tmp_path / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert recipe_differences(load_recipe(tmp_path / "recipe.toml")[0]) == ["latents.num_latents", "train.epochs"]


def test_recipe_differences_begin_with_deviations() -> None:
    recipe = load_recipe("kava-llama1b-aug", ("latents.num_latents=12",))[0].model_copy(
        update={"deviations": {"model.dtype": "why"}}
    )
    assert recipe_differences(recipe) == ["model.dtype", "latents.num_latents"]


@pytest.mark.parametrize("name", sorted({name for names in shipped_recipes().values() for name in names}))
def test_shipped_recipe_differences_are_its_deviations(name: str) -> None:
    recipe = load_recipe(name)[0]
    assert recipe_differences(recipe) == list(recipe.deviations)


def test_recipe_differences_without_table_row() -> None:
    assert recipe_differences(load_recipe("demo-kava", ("latents.num_latents=3",))[0]) == []


@pytest.mark.parametrize("name", ["icot-mistral7b-aug", "icot-gpt2-mult9", "coconut-gpt2-aug", "coconut-gpt2-prosqa"])
def test_recipes_of_code_that_decays_every_parameter_say_so(name: str) -> None:
    """`build_adamw` decays matrices only; iCoT's and Coconut's code gives all parameters to AdamW in one group."""
    recipe = load_recipe(name)[0]
    groups = build_adamw(nn.LayerNorm(3), recipe.train).param_groups
    assert [group["weight_decay"] for group in groups] == [0.0]
    assert "train.weight_decay" in recipe.deviations
