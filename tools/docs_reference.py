"""Write the generated pages of the documentation site: commands, recipe keys, and the API of each package."""

import contextlib
import inspect
import io
import os
import textwrap
from pathlib import Path

import laconic
from laconic.cli.main import COMMANDS, parse_command
from laconic.config.key_help import KeyHelp, iter_tables

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


def reference_pages() -> dict[str, str]:
    """Return the Markdown of every generated reference page by its path in the site."""
    pages = {"reference/commands.md": commands_page(), "reference/recipes.md": recipes_page()}
    pages["reference/api/index.md"] = api_index()
    for name in API_MODULES:
        pages[f"reference/api/{name}.md"] = f"---\ntitle: {name}\n---\n\n::: laconic.{name}\n"
    return pages


def list_subcommands(name: str) -> list[str]:
    """Return the subcommands of a command with its name, such as "data list"; of one without them, its name."""
    command = COMMANDS[name]
    return [f"{name} {key}" for key in command] if isinstance(command, dict) else [name]


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
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    lines = (line.rstrip() for line in output.getvalue().strip().splitlines())
    return "\n".join(textwrap.fill(line, HELP_COLUMNS) if len(line) > HELP_COLUMNS else line for line in lines)


def commands_page() -> str:
    """Return the page with the help of every command."""
    parts = [
        "# Commands\n\nWhat `laconic COMMAND --help` prints. Every command ends with a"
        " [documented exit code](../guarantees.md)."
    ]
    for name in COMMANDS:
        for command in list_subcommands(name):
            parts.append(f"## laconic {command}\n\n```text\n{help_text(command)}\n```")
    return "\n\n".join(parts) + "\n"


def recipes_page() -> str:
    """Return the page with every key of a recipe, from the schema that `laconic train --schema` prints."""
    parts = [
        "# Recipe keys\n\nFrom the JSON Schema that `laconic train --schema` prints. A recipe is a TOML file;"
        " `laconic recipes list` names those that come with laconic, and `laconic recipes show NAME` prints one."
        " `laconic recipes keys` prints this page as text."
        " A key is overridden on the command line as `train.learning_rate=1e-3`. An unknown key is an error that"
        " suggests the closest one."
    ]
    for table in iter_tables():
        if table.keys:
            title = f"`[{table.name}]`" if table.name else "Top level"
            head = "| key | value | default | meaning |\n|---|---|---|---|\n"
            parts.append(f"## {title}\n\n{table.meaning}\n\n{head}" + "\n".join(map(table_row, table.keys)))
    return "\n\n".join(parts) + "\n"


def table_row(key: KeyHelp) -> str:
    """Return one row of a table of keys."""
    cells = (f"`{key.key.rpartition('.')[2]}`", key.values, key.default, key.meaning.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


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
