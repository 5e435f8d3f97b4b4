"""What pages say is possible is possible: commands and flags parse, recipe keys exist, Python compiles and imports."""

import ast
import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from laconic.cli.commands.recipes import list_recipes
from laconic.cli.main import COMMANDS, parse_command
from laconic.config.recipe_keys import known_keys
from tests.conftest import REPO
from tests.house.source import blocks, texts
from tools.docs_reference import help_text, list_subcommands
from tools.docs_site import LINK, on_page_content, resolve_link, split_lines

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
ON_PAGES = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
SHELLS = ("console", "sh", "bash", "shell", "")
OPERATORS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "(", ")"}


@pytest.mark.medium
@ON_PAGES
def test_commands_of_the_page_parse(page: Path) -> None:
    wrong = []
    for number, command in shell_commands(page):
        error = parse_error(command)
        if error:
            wrong.append(f"{number}: laconic {shlex.join(command)}: {error}")
    assert not wrong, "\n".join(wrong)


@ON_PAGES
def test_flags_in_the_text_of_the_page_exist(page: Path) -> None:
    wrong = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        for span in re.findall(r"`laconic ([a-z][^`]*)`", line):
            words = span.split()
            name = words[0]
            if name not in COMMANDS:
                wrong.append(f"{number}: no command {name}")
                continue
            known = set().union(*map(flags, list_subcommands(name)))
            named = {word.split("=")[0].rstrip(",.;:)") for word in words if word.startswith("--")}
            wrong += [
                f"{number}: laconic {name} has no {flag}" for flag in named - known if not is_recipe_key(flag[2:])
            ]
    assert not wrong, "\n".join(wrong)


@ON_PAGES
def test_python_of_the_page_compiles_and_imports(page: Path) -> None:
    wrong = []
    for start, text in blocks(page, "python"):
        tree = ast.parse(text, f"{page.name}:{start}")
        wrong += [f"{start}: {name} does not exist" for name in laconic_names(tree) if not exists(name)]
    assert not wrong, "\n".join(wrong)


@ON_PAGES
def test_recipes_of_the_page_have_known_keys(page: Path) -> None:
    for start, text in blocks(page, "toml"):
        wrong = [key for key in toml_keys(tomllib.loads(text)) if not is_recipe_key(key)]
        assert not wrong, f"{start}: {wrong}"


@ON_PAGES
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    name = page.relative_to(REPO).as_posix()
    prose = "\n".join(line for line, is_prose in split_lines(page.read_text(encoding="utf-8")) if is_prose)
    targets = [resolve_link(match[1], name) for match in LINK.finditer(prose)]
    generated = "docs/reference/"  # tools/docs_reference.py writes these when the site is built
    wrong = [target for target in targets if not (REPO / target).exists() and not target.startswith(generated)]
    assert not wrong, wrong


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (REPO / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [path.relative_to(REPO / "docs").as_posix() for path in PAGES if REPO / "docs" in path.parents]
    assert pages
    assert not [page for page in pages if not re.search(rf"[-:] {re.escape(page)}$", navigation, re.MULTILINE)]


def test_examples_of_docstrings_are_code_on_the_site() -> None:
    """Below a heading `Example:` the site runs the lines together as quoted text."""
    assert not [str(path) for path, text in texts("src") if re.search(r"^ *Example:$", text, re.MULTILINE)]


def test_the_checks_see_what_is_wrong() -> None:
    assert parse_error(["generate", "stories260k", "a", "--max-token", "3"])
    assert parse_error(["train", "demo-kava", "train.step=3"])
    assert parse_error(["train", "demo-kawa"])
    assert parse_error(["train", "own.toml", "train.steps=3"]) is None
    assert not exists("laconic.models.decoder:Encoder")
    assert not is_recipe_key("train.step")
    assert "--keep" in flags("compress")


def test_site_does_not_break_flags_after_a_hyphen() -> None:
    page = "<p><code>laconic compress --fit 9</code> and <code>demo-*</code></p><pre><code>a --b\nc</code></pre>"
    assert on_page_content(page, None, None, None) == (
        '<p><code>laconic compress <span class="nowrap">--fit</span> 9</code> and '
        '<code><span class="nowrap">demo-*</span></code></p><pre><code>a --b\nc</code></pre>'
    )


def shell_commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and arguments of every laconic command in a page's blocks for a shell."""
    for start, text in blocks(page, *SHELLS):
        language = page.read_text(encoding="utf-8").splitlines()[start - 2].strip().removeprefix("```")
        variables: dict[str, list[str]] = {}
        number = start
        for line in re.sub(r"\\\n\s*", "\0", text).split("\n"):
            if language != "console" or line.startswith("$ "):
                for words in split_commands(line.removeprefix("$ ").replace("\0", " ")):
                    words = [part for word in words for part in variables.get(word, [word])]
                    while words and (match := re.fullmatch(r"(\w+)=(.*)", words[0], re.DOTALL)):
                        variables[f"${match[1]}"] = shlex.split(match[2])
                        words = words[1:]
                    if words[:1] == ["laconic"]:
                        yield number, words[1:]
                    elif "laconic" in words and words[words.index("laconic") - 1] == "-m":
                        yield number, words[words.index("laconic") + 1 :]
            number += 1 + line.count("\0")


def split_commands(line: str) -> list[list[str]]:
    """Split a line of shell at pipes and other operators; lines that are not shell give nothing."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:
        return []
    parts: list[list[str]] = [[]]
    skip = False
    for token in tokens:
        if token in OPERATORS:
            skip = token in {">", ">>", "<"}  # the next word names a file
            parts += [] if skip else [[]]
        elif skip:
            skip = False
        else:
            parts[-1].append(token)
    return parts


def parse_error(arguments: list[str]) -> str | None:
    """Return why the command line refuses arguments, None if it takes them."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            command = parse_command(arguments)
    except SystemExit as end:
        return errors.getvalue().strip() if end.code else None
    if arguments[0] != "train" or command.recipe is None:
        return None
    if not re.search(r"[./]", command.recipe) and command.recipe not in recipe_names() | {"RECIPE"}:
        return f"no recipe {command.recipe}"
    wrong = [
        key
        for key in (item.partition("=")[0] for item in command.overrides if not item.isupper())
        if not is_recipe_key(key)
    ]
    return f"no recipe key {', '.join(wrong)}" if wrong else None


@cache
def flags(command: str) -> frozenset[str]:
    """Return the flags in a command's help."""
    return frozenset(re.findall(r"--[a-z][a-z-]*", help_text(command)))


@cache
def recipe_names() -> frozenset[str]:
    """Return the names of the shipped recipes."""
    return frozenset(name for name, *_ in list_recipes())


@cache
def recipe_keys() -> frozenset[str]:
    """Return the dotted names of all keys and tables of a recipe."""
    return frozenset(known_keys())


def is_recipe_key(key: str) -> bool:
    """Return whether a recipe may have a key; options of a method outside laconic are its own."""
    return key in recipe_keys() or key.startswith(("method_options.", "deviations."))


def toml_keys(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a TOML file."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from toml_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def laconic_names(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names that a program imports from laconic or reads as `laconic.NAME`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "laconic")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "laconic":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "laconic":
            yield f"laconic:{node.attr}"


def exists(name: str) -> bool:
    """Return whether a module or, after a colon, a name in it exists."""
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
