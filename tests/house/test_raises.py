"""Every raise in src has a test: the constant part of its message is quoted by one, found by syntax tree."""

import ast
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest

from tests.conftest import REPO
from tests.house.source import texts, trees

# (file, the raise as `ast.unparse` prints it) -> why no test quotes it. An entry that fits nothing fails.
ALLOWED: dict[tuple[str, str], str] = {
    (
        "src/laconic/verification/traces.py",
        "raise Abandoned",
    ): "no error but a signal: it ends the thread behind a generator",
    (
        "src/laconic/config/load.py",
        "raise Usage('\\n'.join(dict.fromkeys(draft.faults)))",
    ): "a list of faults, each of which tests/recipe/test_read.py quotes",
    (
        "src/laconic.data.documents.load.py",
        "raise BadInput(f'{file}:{number}:{fault.column}: {fault.text}')",
    ): "a fault, each of which tests/data/test_texts.py quotes",
    ("src/laconic/verification/traces.py", "raise made"): "hands on what a thread raised",
    ("src/laconic/training/signals.py", "raise Interrupted"): "no error but a signal, caught by the loop",
    (
        "src/laconic/evaluation/reasoning/run.py",
        "raise Interrupted",
    ): "no error but a signal to several ranks; Preempted says so",
}

ENOUGH = 20  # characters of a message that a test must quote; all of it if it is shorter


def pieces(node: ast.AST, names: dict[str, ast.AST], functions: dict[str, ast.AST]) -> Iterator[str]:
    """Constant text in an expression, through local names and functions that make the error."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
        return  # a pattern is no message
    elif isinstance(node, ast.Name) and node.id in names:
        yield from pieces(names[node.id], {k: v for k, v in names.items() if k != node.id}, functions)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
        made = functions[node.func.id]
        inside = assigned(made)
        rest = {k: v for k, v in functions.items() if k != node.func.id}
        for part in ast.walk(made):
            if isinstance(part, ast.Return) and part.value is not None:
                yield from pieces(part.value, inside, rest)
        for argument in node.args:
            yield from pieces(argument, names, functions)
    else:
        for child in ast.iter_child_nodes(node):
            yield from pieces(child, names, functions)


def assigned(function: ast.AST) -> dict[str, ast.AST]:
    """Name -> last expression given to it inside a function."""
    return {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def raises(tree: ast.Module, functions: dict[str, ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Line, text, longest constant piece (empty if none) of every raise that makes an error; re-raising is none."""

    def look(node: ast.AST, names: dict[str, ast.AST], caught: set[str]) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            names = names | assigned(node)
        if isinstance(node, ast.ExceptHandler) and node.name:
            caught = caught | {node.name}
        if isinstance(node, ast.Raise) and node.exc is not None:
            again = isinstance(node.exc, ast.Name) and node.exc.id in caught
            if not again:
                found = [text.strip() for text in pieces(node.exc, names, functions)]
                yield (
                    node.lineno,
                    ast.unparse(node),
                    max((t for t in found if any(map(str.isalpha, t))), key=len, default=""),
                )
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):  # what a raise stands in
                yield from look(child, names, caught)

    return look(tree, {}, set())


def constants(code: CodeType) -> Iterator[str]:
    """Every string constant of a compiled file."""
    rest: list[Any] = [code]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, CodeType):
            rest += one.co_consts
        elif isinstance(one, tuple | frozenset):
            rest += one


def quoted() -> str:
    """All text of the tests, this file's aside: string constants, and the tables of cases beside them."""
    parts = [
        text.replace("\\", "")  # match= is a regular expression
        for path, source in texts("tests")
        if path.name != "test_raises.py"
        for text in constants(compile(source, str(path), "exec", dont_inherit=True))
    ]
    tables = [p for p in (REPO / "tests").rglob("*") if p.suffix in {".toml", ".jsonl"}]
    return "\0".join(parts + [table.read_text(encoding="utf-8") for table in tables])


def is_quoted(message: str, text: str) -> bool:
    message = message.replace("\\", "")
    width = min(ENOUGH, len(message))
    return width > 0 and any(message[i : i + width] in text for i in range(len(message) - width + 1))


def test_every_raise_is_quoted_by_a_test() -> None:
    source = list(trees("src/laconic"))
    functions: dict[str, ast.AST] = {
        node.name: node for _, tree in source for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    text = quoted()
    untested: list[str] = []
    used: set[tuple[str, str]] = set()
    for path, tree in source:
        for line, statement, message in raises(tree, functions):
            if (str(path), statement) in ALLOWED:
                used.add((str(path), statement))
            elif not is_quoted(message, text):
                untested.append(f"{path}:{line}: {message or statement}")
    assert not untested, "no test quotes these errors:\n" + "\n".join(untested)
    assert not ALLOWED.keys() - used, "ALLOWED names raises that are gone or are quoted now"
    assert all(ALLOWED.values()), "every exception has a reason"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("raise ValueError('nothing to read here')", "nothing to read here"),
        ("raise ValueError(f'{n} rows asked of {m}; ask for fewer') from error", "; ask for fewer"),
        ("def f():\n    text = f'row {n} has no live position'\n    raise Usage(text)", "has no live position"),
        ("def bad(n):\n    return Usage(f'{n} is not a number')\nraise bad(3)", "is not a number"),
        ("raise Usage(', '.join(problems))", ""),
    ],
)
def test_the_search_finds_the_message(statement: str, message: str) -> None:
    tree = ast.parse(statement)
    functions: dict[str, ast.AST] = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert [found for _, _, found in raises(tree, functions)] == [message]


def test_raising_again_is_no_new_error() -> None:
    tree = ast.parse("try:\n    f()\nexcept E as error:\n    raise error\nexcept F:\n    raise")
    assert not list(raises(tree, {}))


def test_a_quotation_is_long_enough() -> None:
    assert is_quoted("does not divide", "3 does not divide 8")
    assert not is_quoted("does not divide num_attention_heads", "3 does not divide 8")
    assert not is_quoted("", "anything")
