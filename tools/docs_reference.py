"""Write the generated pages of the documentation site: commands, recipe keys, and the API of each package."""

import contextlib
import inspect
import io
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import laconic
from laconic.cli.main import COMMANDS, parse_command
from laconic.config.recipe import Recipe

HELP_COLUMNS = 82
# In the order of the packages' table in CONTRIBUTING.md. `serving` and `cli` are used from a shell.
API_MODULES = (
    "models",
    "halting",
    "generation",
    "latent",
    "compression",
    "nested",
    "data",
    "training",
    "config",
    "storage",
    "experiment",
    "evaluation",
    "verification",
    "batches",
    "interfaces",
    "losses",
    "errors",
    "rng",
)
SUBCOMMANDS = {
    "demo": ("demo think", "demo read"),
    "recipes": ("recipes list", "recipes show"),
    "data": ("data list", "data check", "data make"),
    "verify": ("verify all", "verify parity"),
}


def reference_pages() -> dict[str, str]:
    """Return the Markdown of every generated reference page by its path in the site."""
    pages = {"reference/commands.md": commands_page(), "reference/recipes.md": recipes_page()}
    pages["reference/api/index.md"] = api_index()
    for name in API_MODULES:
        pages[f"reference/api/{name}.md"] = f"---\ntitle: {name}\n---\n\n::: laconic.{name}\n"
    return pages


def help_text(command: str) -> str:
    """Return what `laconic COMMAND --help` prints on a terminal."""
    output = io.StringIO()
    before = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=str(HELP_COLUMNS), NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            parse_command([*command.split(), "--help"])
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    lines = (line.rstrip() for line in output.getvalue().strip().splitlines())
    return "\n".join(textwrap.fill(line, HELP_COLUMNS) if len(line) > HELP_COLUMNS else line for line in lines)


def commands_page() -> str:
    """Return the page with the help of every command."""
    parts = [
        "# Commands\n\nWhat `laconic COMMAND --help` prints. Every command ends with a"
        " [documented exit code](../guarantees.md)."
    ]
    for name in COMMANDS:
        for command in SUBCOMMANDS.get(name, (name,)):
            parts.append(f"## laconic {command}\n\n```text\n{help_text(command)}\n```")
    return "\n\n".join(parts) + "\n"


def recipes_page() -> str:
    """Return the page with every key of a recipe, from the schema that `laconic train --schema` prints."""
    schema = Recipe.model_json_schema()
    parts = [
        "# Recipe keys\n\nFrom the JSON Schema that `laconic train --schema` prints. A recipe is a TOML file;"
        " `laconic recipes list` names those that come with laconic, and `laconic recipes show NAME` prints one."
        " A key is overridden on the command line as `train.learning_rate=1e-3`. An unknown key is an error that"
        " suggests the closest one."
    ]
    for title, description, table in iterate_tables(schema):
        rows = [table_row(key, value, table) for key, value in table["properties"].items() if not table_of(value)]
        if rows:
            head = "| key | value | default | meaning |\n|---|---|---|---|\n"
            parts.append(f"## {title}\n\n{description}\n\n{head}" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def iterate_tables(schema: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield title, description and schema of a recipe's tables, each before its subtables."""

    def walk(prefix: str, description: str, table: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        yield f"`[{prefix}]`" if prefix else "Top level", description, table
        for key, value in table["properties"].items():
            if name := table_of(value):
                text = f"{value.get('description', '').capitalize()}."
                yield from walk(f"{prefix}.{key}".lstrip("."), text, schema["$defs"][name])

    yield from walk("", "Keys before the first table.", schema)


def table_of(value: dict[str, Any]) -> str | None:
    """Return the definition that a key's schema names; None if its value is not a table."""
    options = [value, *value.get("anyOf", [])]
    return next((option["$ref"].rpartition("/")[2] for option in options if "$ref" in option), None)


def table_row(key: str, value: dict[str, Any], table: dict[str, Any]) -> str:
    """Return one row of a table of keys."""
    default = "required" if key in table.get("required", ()) else format_default(value.get("default"))
    cells = (f"`{key}`", describe_type(value), default, value.get("description", "").replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def describe_type(value: dict[str, Any]) -> str:
    """Return the values that a key accepts, for example `integer ≥ 1`."""
    if "anyOf" in value:
        return " or ".join(describe_type(option) for option in value["anyOf"] if option.get("type") != "null")
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "pattern" in value:
        return "`package.module:Class`"
    if value.get("type") == "array" and "prefixItems" not in value:
        return f"list of {describe_type(value['items'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    # 2^63 is the bound of integers that a seed has; it says nothing to a reader
    bounds = [f"{sign} {value[name]:g}" for name, sign in signs.items() if abs(value.get(name, 1e18)) < 1e18]
    return " ".join([value.get("type", "any"), ", ".join(bounds)]).strip()


def format_default(default: Any) -> str:
    """Return a default as TOML would write it; "–" for a key that is unset."""
    if default is None:
        return "–"
    text = str(default).lower() if isinstance(default, bool) else repr(default).replace("'", '"')
    return f"`{text}`"


def api_index() -> str:
    """Return the page of the public names, with the first sentence of each docstring and a link."""
    rows = []
    for name in laconic.__all__:
        if name.startswith("__"):
            continue
        target = getattr(laconic, name)
        first = (inspect.getdoc(target) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| [`laconic.{name}`][{target.__module__}.{target.__qualname__}] | {first} |")
    head = "# API\n\nThe names that `import laconic` gives. They are loaded on first use. The packages' pages"
    head += " document everything else that is public.\n\n| name | |\n|---|---|\n"
    return head + "\n".join(rows) + "\n"


def source_page(path: Path, name: str) -> str:
    """Return a page with a file of the repository, or the list of a folder's files; `name` is its path there."""
    head = f"---\ntitle: {path.name}\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n\n# {name}\n\n"
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
        return head + "\n".join(f"- [{file.name}]({file.name}.md)" for file in files) + "\n"
    text = path.read_text(encoding="utf-8").rstrip()
    languages = {".py": "python", ".toml": "toml", ".jsonl": "json", ".sh": "bash"}
    return f"{head}~~~~~~~~{{ .{languages.get(path.suffix, 'text')} }}\n{text}\n~~~~~~~~\n"
