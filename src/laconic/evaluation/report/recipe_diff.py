"""Recipe keys in which a run differs from the paper's table row, or from the shipped recipe of that row."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache

from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.recipe import BOOKKEEPING_KEYS, Recipe
from laconic.config.recipe_keys import flatten

# Keys that cannot change what a run learns; the number of training steps can.
IGNORED_KEYS = ("seed", *(key for key in BOOKKEEPING_KEYS if key not in ("train.steps", "train.epochs")))


def recipe_differences(recipe: Recipe) -> list[str]:
    """Return the keys that the recipe lists as deviations, then those that differ from the shipped recipe."""
    if recipe.paper_table is None or recipe.table_row is None:
        return []
    others = [
        changed_keys(recipe, load_recipe(name)[0])
        for name in shipped_recipes().get((recipe.paper_table, recipe.table_row), ())
    ]
    return list(dict.fromkeys((*recipe.deviations, *min(others, key=len, default=[]))))


def changed_keys(ours: Recipe, theirs: Recipe) -> list[str]:
    a, b = (flatten(recipe.model_dump(mode="json")) for recipe in (ours, theirs))
    keys = [key for key in {**a, **b} if key not in IGNORED_KEYS and not key.startswith("deviations.")]
    return [key for key in keys if a.get(key) != b.get(key)]


@cache
def shipped_recipes() -> Mapping[tuple[str, str], Sequence[str]]:
    """Return the names of the shipped recipes by paper table and row; a row may have several."""
    names: dict[tuple[str, str], list[str]] = {}
    for path in sorted(SHIPPED_RECIPES.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if "table_row" in content:
            names.setdefault((content["paper_table"], content["table_row"]), []).append(path.stem)
    return names
