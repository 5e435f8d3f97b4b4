"""Keys in which the recipe of a run differs from its table row, and from the recipe of that row as laconic ships it."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache

from laconic.config.load import SHIPPED_RECIPES, load_recipe
from laconic.config.recipe import RESUMABLE_KEYS, Recipe, flatten

# Keys that say what a run is called, kept and repeated by; how long it is trained is none of them.
IGNORED_KEYS = ("seed", *(key for key in RESUMABLE_KEYS if key not in ("train.steps", "train.epochs")))


def recipe_differences(recipe: Recipe) -> list[str]:
    """The keys that the recipe itself says differ from its row, then those that are not as shipped."""
    if recipe.paper_table is None or recipe.table_row is None:
        return []
    others = [
        changed_keys(recipe, load_recipe(name)[0])
        for name in shipped_recipes().get((recipe.paper_table, recipe.table_row), ())
    ]
    return list(dict.fromkeys((*recipe.deviations, *min(others, key=len, default=[]))))


def changed_keys(ours: Recipe, theirs: Recipe) -> list[str]:
    """Keys with different values."""
    a, b = (flatten(each.model_dump(mode="json")) for each in (ours, theirs))
    keys = [key for key in {**a, **b} if key not in IGNORED_KEYS and not key.startswith("deviations.")]
    return [key for key in keys if a.get(key) != b.get(key)]


@cache
def shipped_recipes() -> Mapping[tuple[str, str], Sequence[str]]:
    """Names of the recipes that come with laconic, by table and row; a row may stand for several."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(SHIPPED_RECIPES.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if "table_row" in content:
            found.setdefault((content["paper_table"], content["table_row"]), []).append(path.stem)
    return found
