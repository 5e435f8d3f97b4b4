"""Keys in which the recipe of a run differs from its table row, and from the recipe of that row as laconic ships it."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache

from laconic.recipe.read import SHIPPED, read
from laconic.recipe.schema import FREE, Recipe, flat

# Keys that say what a run is called, kept and repeated by; how long it is trained is none of them.
ASIDE = ("seed", *(key for key in FREE if key not in ("train.steps", "train.epochs")))


def differences(recipe: Recipe) -> list[str]:
    """The keys that the recipe itself says differ from its row, then those that are not as shipped."""
    if recipe.source is None or recipe.row is None:
        return []
    others = [changed(recipe, read(name)[0]) for name in shipped().get((recipe.source, recipe.row), ())]
    return list(dict.fromkeys((*recipe.differs, *min(others, key=len, default=[]))))


def changed(ours: Recipe, theirs: Recipe) -> list[str]:
    """Keys with different values."""
    a, b = (flat(each.model_dump(mode="json")) for each in (ours, theirs))
    keys = [key for key in {**a, **b} if key not in ASIDE and not key.startswith("differs.")]
    return [key for key in keys if a.get(key) != b.get(key)]


@cache
def shipped() -> Mapping[tuple[str, str], Sequence[str]]:
    """Names of the recipes that come with laconic, by table and row; a row may stand for several."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(SHIPPED.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if "row" in content:
            found.setdefault((content["source"], content["row"]), []).append(path.stem)
    return found
