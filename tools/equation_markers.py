"""Collect equation markers from syntax trees: docstrings, marked tests, their oracles and misreadings.

Nothing is imported or run; whether a marked test passes is up to pytest.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parse_text(name: str, text: str) -> ast.Module:
    """Parse a text; the result is cached."""
    return ast.parse(text, name)


def parse_file(path: Path) -> ast.Module:
    """Parse a file in its current version."""
    return parse_text(str(path), path.read_text(encoding="utf-8"))


def iter_functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """Yield every function and method with its dotted name inside the module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from iter_functions(child, f"{name}.")
        else:
            yield from iter_functions(child, prefix)


def function_docstrings(path: Path) -> dict[str, str]:
    """Return the docstring of every function of a file by its dotted name; "" if it has none."""
    return {name: ast.get_docstring(node) or "" for name, node in iter_functions(parse_file(path))}


def imported_names(path: Path) -> dict[str, str]:
    """Return the imported names of a file and what they refer to: `import tests.a as o` gives {"o": "tests.a"}."""
    return imported_names_of_tree(parse_file(path))


@cache
def imported_names_of_tree(tree: ast.Module) -> dict[str, str]:
    """Return the imported names of a syntax tree."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(name.asname or name.name.split(".")[0]): name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {(name.asname or name.name): f"{node.module}.{name.name}" for name in node.names}
    return names


def find_module(root: Path, dotted: str) -> Path | None:
    """Return the file of a dotted module below `root`, or None."""
    path = root / Path(*dotted.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports_package(root: Path, path: Path, package: str) -> bool:
    """Return whether a file imports `package`, directly or through the test modules that it imports."""
    pending, visited = [path], set[Path]()
    while pending:
        file = pending.pop()
        visited.add(file)
        for dotted in imported_names(file).values():
            if dotted.split(".")[0] == package:
                return True
            module = find_module(root, dotted) or find_module(root, dotted.rpartition(".")[0])
            if module and module not in visited:
                pending.append(module)
    return False


@dataclass(frozen=True)
class OracleTableEntry:
    """`TABLE["C1"]` in a test: the file that defines the table, and the names under the key."""

    file: Path
    names: tuple[str, ...]


@dataclass(frozen=True)
class MarkedTest:
    """A test marked `equation(paper, id)`: its entries of ORACLE and MISREAD, and every name that it mentions."""

    file: Path
    name: str
    oracles: tuple[OracleTableEntry, ...]
    misread: tuple[OracleTableEntry, ...]
    mentions: frozenset[str]


def literal_table(path: Path, name: str) -> dict[str, ast.expr]:
    """Return the text keys and the expressions of a dictionary literal at the top of a file."""
    for node in parse_file(path).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            table = node.value
            items = zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ()
            texts = [(key.value, value) for key, value in items if isinstance(key, ast.Constant)]
            return {key: value for key, value in texts if isinstance(key, str)}
    return {}


def entry_names(path: Path, name: str, key: str) -> tuple[str, ...]:
    """Return the names in `name[key]`: the keys of a dictionary literal, or the one function."""
    value = literal_table(path, name).get(key)
    if isinstance(value, ast.Dict):
        return tuple(str(k.value) for k in value.keys if isinstance(k, ast.Constant))
    return (ast.unparse(value),) if isinstance(value, ast.Name | ast.Attribute) else ()


def table_lookups(root: Path, path: Path, node: ast.AST, name: str, key: str) -> tuple[OracleTableEntry, ...]:
    """Return every `name[key]` or `module.name[key]` inside `node`, resolved to the file that defines the table."""
    imported, entries = imported_names(path), dict[OracleTableEntry, None]()
    for part in ast.walk(node):
        if not (isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant) and part.slice.value == key):
            continue
        file: Path | None = None
        if isinstance(part.value, ast.Name) and imported.get(part.value.id, "").endswith(f".{name}"):
            file = find_module(root, imported[part.value.id].rpartition(".")[0])
        elif isinstance(part.value, ast.Name) and part.value.id == name:
            file = path
        elif isinstance(part.value, ast.Attribute) and part.value.attr == name:
            module = ast.unparse(part.value.value)
            file = find_module(root, imported.get(module, module))
        if file is not None:
            entries[OracleTableEntry(file, entry_names(file, name, key))] = None
    return tuple(entries)


def equation_marks(node: FunctionNode | ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield (paper, id) of every `pytest.mark.equation` of a function or class."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "equation":
            texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if len(texts) == 2:
                yield texts[0], texts[1]


def find_marked_tests(root: Path, tests: Path) -> Mapping[tuple[str, str], tuple[MarkedTest, ...]]:
    """Return all marked tests below `tests` by (paper, id), in the order of their files."""
    marked: dict[tuple[str, str], list[MarkedTest]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        if "equation(" not in path.read_text(encoding="utf-8"):
            continue
        for node in ast.walk(parse_file(path)):
            if not isinstance(node, FunctionNode | ast.ClassDef):
                continue
            for paper, id in equation_marks(node):
                mentions = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
                mentions |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
                oracles, misread = (table_lookups(root, path, node, name, id) for name in ("ORACLE", "MISREAD"))
                test = MarkedTest(path, node.name, oracles, misread, frozenset(mentions))
                marked.setdefault((paper, id), []).append(test)
    return {key: tuple(tests) for key, tests in marked.items()}
