"""What the syntax trees of sources and tests say about equations: docstrings, marked tests, oracles, misreadings.

Nothing is imported or run: a test that is marked and cannot run fails where tests are run.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parse_text(name: str, text: str) -> ast.Module:
    """The tree of a text, made once."""
    return ast.parse(text, name)


def parse_file(path: Path) -> ast.Module:
    """The tree of a file as it is now."""
    return parse_text(str(path), path.read_text(encoding="utf-8"))


def iter_functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """Every function and method with its dotted name inside the module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            yield from iter_functions(child, f"{name}.")
        else:
            yield from iter_functions(child, prefix)


def function_docstrings(path: Path) -> dict[str, str]:
    """The docstring of every function of a file by its dotted name; empty where there is none."""
    return {name: ast.get_docstring(node) or "" for name, node in iter_functions(parse_file(path))}


def imported_names(path: Path) -> dict[str, str]:
    """Names of a file and the dotted things they stand for: `from tests import oracles as o` is o -> tests.oracles."""
    return imported_names_of_tree(parse_file(path))


@cache
def imported_names_of_tree(tree: ast.Module) -> dict[str, str]:
    """The same of a tree."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(name.asname or name.name.split(".")[0]): name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(name.asname or name.name): f"{node.module}.{name.name}" for name in node.names}
    return found


def find_module(root: Path, dotted: str) -> Path | None:
    """The file of a dotted module below `root`."""
    path = root / Path(*dotted.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports_package(root: Path, path: Path, package: str) -> bool:
    """Whether a file imports `package`, itself or by the test modules it imports."""
    todo, done = [path], set[Path]()
    while todo:
        file = todo.pop()
        done.add(file)
        for dotted in imported_names(file).values():
            if dotted.split(".")[0] == package:
                return True
            found = find_module(root, dotted) or find_module(root, dotted.rpartition(".")[0])
            if found and found not in done:
                todo.append(found)
    return False


@dataclass(frozen=True)
class OracleTableEntry:
    """`TABLE["C1"]` as a test takes it: the file that holds the table, and the names found under the key."""

    file: Path
    names: tuple[str, ...]


@dataclass(frozen=True)
class MarkedTest:
    """One test marked `equation(paper, id)`: what it takes from ORACLE and MISREAD, and every name it mentions."""

    file: Path
    name: str
    oracles: tuple[OracleTableEntry, ...]
    misread: tuple[OracleTableEntry, ...]
    mentions: frozenset[str]


def literal_table(path: Path, name: str) -> dict[str, ast.expr]:
    """A dictionary written out at the top of a file under `name`: its text keys and their expressions."""
    for node in parse_file(path).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = getattr(node, "value", None)
            pairs = zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ()
            return {key.value: at for key, at in pairs if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return {}


def entry_names(path: Path, name: str, key: str) -> tuple[str, ...]:
    """What stands in `name[key]` of a file: the keys of a dictionary written out, or the one function named."""
    value = literal_table(path, name).get(key)
    if isinstance(value, ast.Dict):
        return tuple(str(k.value) for k in value.keys if isinstance(k, ast.Constant))
    return (ast.unparse(value),) if isinstance(value, ast.Name | ast.Attribute) else ()


def table_lookups(root: Path, path: Path, node: ast.AST, name: str, key: str) -> tuple[OracleTableEntry, ...]:
    """Every `name[key]` or `module.name[key]` inside `node`, followed to the file where the table stands."""
    known, found = imported_names(path), dict[OracleTableEntry, None]()
    for part in ast.walk(node):
        if not (isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant) and part.slice.value == key):
            continue
        file: Path | None = None
        if isinstance(part.value, ast.Name) and known.get(part.value.id, "").endswith(f".{name}"):
            file = find_module(root, known[part.value.id].rpartition(".")[0])
        elif isinstance(part.value, ast.Name) and part.value.id == name:
            file = path
        elif isinstance(part.value, ast.Attribute) and part.value.attr == name:
            module = ast.unparse(part.value.value)
            file = find_module(root, known.get(module, module))
        if file is not None:
            found[OracleTableEntry(file, entry_names(file, name, key))] = None
    return tuple(found)


def equation_marks(node: FunctionNode | ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The (paper, id) of every `pytest.mark.equation` above a function or class."""
    for call in node.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "equation":
            texts = [at.value for at in call.args if isinstance(at, ast.Constant) and isinstance(at.value, str)]
            if len(texts) == 2:
                yield texts[0], texts[1]


def find_marked_tests(root: Path, tests: Path) -> Mapping[tuple[str, str], tuple[MarkedTest, ...]]:
    """All marked tests below `tests` by (paper, id), in the order of their files."""
    found: dict[tuple[str, str], list[MarkedTest]] = {}
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
                found.setdefault((paper, id), []).append(
                    MarkedTest(path, node.name, oracles, misread, frozenset(mentions))
                )
    return {key: tuple(tests) for key, tests in found.items()}
