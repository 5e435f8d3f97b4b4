"""Size limits of the source tree: 400 lines a file, 60 lines a function without its signature and docstring."""

import ast

from tests.house.source import syntax_trees, texts

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function's body, without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_limits_file_length() -> None:
    long = {
        str(path): lines for path, text in texts("src", "tools") if (lines := len(text.splitlines())) > MAX_FILE_LINES
    }
    assert not long


def test_limits_function_length() -> None:
    long = {
        f"{path}:{node.lineno} {node.name}": lines
        for path, tree in syntax_trees("src", "tools")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := body_lines(node)) > MAX_FUNCTION_LINES
    }
    assert not long


def test_limits_reference_length() -> None:
    """A reference implementation fits on one page: at most 120 lines."""
    references = {
        str(path): len(text.splitlines())
        for path, text in texts("src")
        if path.name.endswith("_reference.py") and "verification" not in path.parts
    }
    assert len(references) >= 10
    assert max(references.values()) <= 120, references
