"""`laconic recipes`: list the recipes that come with laconic, and print one."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from laconic.cli.arguments import OutputFormat
from laconic.cli.files import print_json

FAMILIES = {
    "Latent thoughts, and their baselines with and without a written chain": (
        "kava", "pccot", "codi", "coconut", "icot", "cot", "nocot",
    ),
    "Summary vectors of documents": ("autocompressor",),
    "Models that learn while they read, and optimizers": ("hope", "lm"),
}  # fmt: skip


def describe_recipe(path: Path) -> str:
    """Return the first sentence of the comment at the beginning of a recipe."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    sentence, _, _ = comment.partition(". ")
    return sentence.removesuffix(".")


def list_recipes() -> Iterator[tuple[str, str, str]]:
    """Yield name, method and description of each recipe."""
    from laconic.config.load import SHIPPED_RECIPES

    for path in sorted(SHIPPED_RECIPES.glob("*.toml")):
        yield path.stem, tomllib.loads(path.read_text(encoding="utf-8"))["method"], describe_recipe(path)


@dataclass(frozen=True)
class RecipesListCommand:
    """List the recipes that come with laconic; each name works in laconic train.

    laconic recipes prints the same list.

    Example: laconic recipes list
    """

    format: OutputFormat = "human"
    """json: print one JSON object to standard output"""

    def run(self) -> int:
        recipes = list(list_recipes())
        if self.format == "json":
            rows = [{"name": name, "description": text} for name, _, text in recipes]
            print_json({"schema": 1, "recipes": rows})
            return 0
        width = max(len(name) for name, _, _ in recipes)
        for heading, methods in FAMILIES.items():
            print(f"{heading}:")
            print("\n".join(f"  {name:<{width}}  {text}" for name, method, text in recipes if method in methods))
            print()
        print("On texts of your own: laconic train read-smollm2 data.path=FILE; on questions: docs/guides/train.md")
        return 0


@dataclass(frozen=True)
class RecipesShowCommand:
    """Print the file of a recipe, to read or to copy.

    Example: laconic recipes show demo-kava > mine.toml
    """

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """name of a recipe that comes with laconic"""

    def run(self) -> int:
        from laconic.config.load import find_recipe_file

        print(find_recipe_file(self.name).read_text(encoding="utf-8"), end="")
        return 0
