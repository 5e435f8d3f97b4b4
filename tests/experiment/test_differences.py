"""Keys in which a run's recipe is not that of its table row."""

from pathlib import Path

import pytest

from laconic.config.load import load_recipe, to_toml
from laconic.evaluation.report.recipe_diff import recipe_differences, shipped_recipes


def test_what_is_put_over_a_recipe_is_named(tmp_path: Path) -> None:
    keys = ("latents.num_latents=12", "train.epochs=1", "seed=2", "train.log_every=5")
    recipe = load_recipe("kava-llama1b-aug", keys)[0]
    assert recipe_differences(recipe) == ["latents.num_latents", "train.epochs"]
    (tmp_path / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    assert recipe_differences(load_recipe(tmp_path / "recipe.toml")[0]) == ["latents.num_latents", "train.epochs"]


def test_what_a_recipe_itself_says_comes_first() -> None:
    recipe = load_recipe("kava-llama1b-aug", ("latents.num_latents=12",))[0].model_copy(
        update={"deviations": {"dtype": "why"}}
    )
    assert recipe_differences(recipe) == ["model.dtype", "latents.num_latents"]


@pytest.mark.parametrize("name", sorted({name for names in shipped_recipes().values() for name in names}))
def test_what_is_shipped_differs_as_it_says(name: str) -> None:
    recipe = load_recipe(name)[0]
    assert recipe_differences(recipe) == list(recipe.deviations)


def test_recipes_of_no_table_differ_from_none() -> None:
    assert recipe_differences(load_recipe("demo-kava", ("latents.num_latents=3",))[0]) == []
