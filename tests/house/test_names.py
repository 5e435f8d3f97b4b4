"""Naming rules of the source tree: no vague identifiers, unique class names, exceptions that end in Error."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import syntax_trees, walk

BANNED = frozenset(
    (
        "told", "said", "shown", "kept", "held", "made", "drawn", "found", "asked", "own", "there", "how", "each",
        "given", "had", "begun", "opened", "looked",
    )
)  # fmt: skip
ALLOWED_NAMES = {
    "held_out",  # held-out data
}
# a banned word where a definition may stand: before punctuation, `in` or the `if` of a match
DEFINITION = rf"(?i)\b_*({'|'.join(BANNED)})_*\b\s*([^\w\s]|in\b|if\b)"
ALLOWED_CLASSES: dict[str, str] = {}  # class name -> why two modules may define it


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every identifier that a module defines: functions, classes, arguments, variables."""
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def banned(name: str) -> bool:
    """Return whether a whole identifier is one of the words that do not say what a value is."""
    return name.strip("_").lower() in BANNED and name not in ALLOWED_NAMES


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    """Yield every class of a module."""
    yield from (node for node in walk(tree) if isinstance(node, ast.ClassDef))


def is_exception(node: ast.ClassDef, exceptions: set[str]) -> bool:
    """Return whether a class derives from an exception, by the names of its bases."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    return bool(bases & exceptions) or any(base.endswith(("Error", "Exception")) for base in bases)


@pytest.mark.medium
@pytest.mark.parametrize("directory", ["src", "tests", "tools", "examples", "benchmarks"])
def test_names_no_vague_identifiers(directory: str) -> None:
    banned_names = [
        f"{path}:{line} {name}"
        for path, tree in syntax_trees(directory, pattern=DEFINITION)
        for line, name in bound_names(tree)
        if banned(name)
    ]
    assert not banned_names, "\n".join(banned_names)


def test_names_class_names_are_unique() -> None:
    places: defaultdict[str, list[Path]] = defaultdict(list)
    for path, tree in syntax_trees("src"):
        for node in classes(tree):
            places[node.name].append(path)
    twice = {
        name: list(map(str, paths)) for name, paths in places.items() if len(paths) > 1 and name not in ALLOWED_CLASSES
    }
    assert not twice


def test_names_exceptions_end_in_error() -> None:
    odd = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in syntax_trees("src")
        for node in classes(tree)
        if is_exception(node, set()) and not node.name.endswith(("Error", "Warning"))
    ]
    assert not odd


def test_names_search_finds_every_kind_of_definition() -> None:
    text = "def said(told, *, held_out=1):\n    self.kept = made = 0\n    for each in []: pass\nclass Shown: ..."
    tree = ast.parse(text)
    assert {name for _, name in bound_names(tree) if banned(name)} == {"said", "told", "kept", "made", "each", "Shown"}
    assert [match[1] for match in re.finditer(DEFINITION, text)] == ["said", "told", "kept", "made", "each", "Shown"]
