"""Describe the keys of a recipe for a reader: the values that each accepts, its default and its meaning."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from laconic.config.recipe import Recipe

INTEGER_BOUND = 1e18  # 2^63 is the bound of integers that a seed has; it says nothing to a reader


class KeyHelp(NamedTuple):
    """A key of a recipe by its dotted name, the values that it accepts, its default and its meaning, in Markdown."""

    key: str
    values: str
    default: str
    meaning: str


class TableHelp(NamedTuple):
    """A table of a recipe by its dotted name, which is empty for the top level, with its own keys."""

    name: str
    meaning: str
    keys: list[KeyHelp]


def iter_tables() -> Iterator[TableHelp]:
    """Yield the tables of a recipe, each before its subtables."""
    schema = Recipe.model_json_schema()

    def walk(prefix: str, meaning: str, table: dict[str, Any]) -> Iterator[TableHelp]:
        dot = prefix and f"{prefix}."
        properties = table["properties"]
        subtables = {key: name for key, value in properties.items() if (name := find_definition(value))}
        required = table.get("required", ())
        keys = [
            KeyHelp(
                f"{dot}{key}",
                describe_values(value),
                "required" if key in required else format_default(value.get("default")),
                " ".join(value.get("description", "").split()),
            )
            for key, value in properties.items()
            if key not in subtables
        ]
        yield TableHelp(prefix, meaning, keys)
        for key, name in subtables.items():
            text = f"{properties[key].get('description', '').capitalize()}."
            yield from walk(f"{dot}{key}", text, schema["$defs"][name])

    yield from walk("", "Keys before the first table.", schema)


def find_definition(value: dict[str, Any]) -> str | None:
    """Return the definition that a key's schema names; None if its value is not a table."""
    options = [value, *value.get("anyOf", [])]
    return next((option["$ref"].rpartition("/")[2] for option in options if "$ref" in option), None)


def describe_values(value: dict[str, Any]) -> str:
    """Return the values that a key accepts, for example `integer ≥ 1`."""
    if "anyOf" in value:
        return " or ".join(describe_values(option) for option in value["anyOf"] if option.get("type") != "null")
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "pattern" in value:
        return "`package.module:Class`"
    if value.get("type") == "array" and "prefixItems" not in value:
        return f"list of {describe_values(value['items'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {value[name]:g}" for name, sign in signs.items() if name in value and abs(value[name]) < INTEGER_BOUND
    ]
    kind = value.get("type", "any")
    return " ".join(["table" if kind == "object" else kind, ", ".join(bounds)]).strip()


def format_default(default: Any) -> str:
    """Return a default as TOML would write it; "–" for a key that is unset."""
    if default is None:
        return "–"
    text = str(default).lower() if isinstance(default, bool) else repr(default).replace("'", '"')
    return f"`{text}`"
