"""`laconic recipes`: list the recipes that come with laconic, print one, and explain the keys of a recipe."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from laconic.cli.arguments import OptionalStr, OutputFormat
from laconic.cli.files import print_json
from laconic.errors import UsageError

MAX_KEY_WIDTH = 44
FAMILIES = {
    "Latent thoughts, and their baselines with and without a written chain": (
        "kava", "pccot", "codi", "coconut", "icot", "cot", "nocot",
    ),
    "Summary vectors of documents": ("autocompressor",),
    "Models that learn while they read, and optimizers": ("hope", "lm"),
}  # fmt: skip


def describe_recipe(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return comment.partition(". ")[0].removesuffix(".")


def list_recipes() -> Iterator[tuple[str, str, str]]:
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

    def run(self) -> int:
        recipes = list(list_recipes())
        if self.format == "json":
            rows = [{"name": name, "method": method, "description": text} for name, method, text in recipes]
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


@dataclass(frozen=True)
class RecipesKeysCommand:
    """Print the keys of a recipe, one per line: its default, the values that it accepts, and its meaning.

    Example: laconic recipes keys

    Example: laconic recipes keys latents.
    """

    text: Annotated[Positional[OptionalStr], arg(metavar="[TEXT]")] = None
    """print only the keys whose name or meaning contains this"""
    format: OutputFormat = "human"

    def run(self) -> int:
        from laconic.config.key_help import iter_tables
        from laconic.config.load import closest_key
        from laconic.config.recipe_keys import known_keys

        wanted = (self.text or "").lower()
        keys = [
            key._replace(values=key.values.replace("`", ""), default=key.default.replace("`", ""))
            for table in iter_tables()
            for key in table.keys
            if wanted in key.key.lower() or wanted in key.meaning.lower()
        ]
        if not keys:
            close = closest_key(wanted.strip("."), known_keys())
            hint = f"did you mean {close}?" if close else "laconic recipes keys prints all"
            raise UsageError(f"no key of a recipe contains {self.text!r}; {hint}")
        if self.format == "json":
            print_json({"schema": 1, "keys": [key._asdict() for key in keys]})
            return 0
        lines = [key.key if key.default in ("–", "required") else f"{key.key} = {key.default}" for key in keys]
        width = min(max(map(len, lines)), MAX_KEY_WIDTH)
        for line, key in zip(lines, keys, strict=True):
            required = "required; " if key.default == "required" else ""
            print(f"{line:<{width}}  # {required}{key.values}: {key.meaning}")
        return 0
