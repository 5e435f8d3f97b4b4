"""Rules of the source tree: package layers, no hidden imports, no pickle, no unconditional skips."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import REPO
from tests.house.source import imported_modules, syntax_trees

LAZY_MODULES = ("src/laconic/__init__.py", "src/laconic/cli/")  # commands that only print must not import torch


def test_layers_import_downward_only() -> None:
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = subprocess.run([sys.executable, "-c", command], cwd=REPO, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def hidden_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and module of every import of laconic inside a function or under `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        is_type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_type_checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for statement in ast.walk(node):
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    for name in imported_modules(statement):
                        if name.split(".")[0] == "laconic":
                            yield statement.lineno, name


def test_imports_of_laconic_are_at_the_top_of_modules() -> None:
    hidden = [
        f"{path}:{line} {name}"
        for path, tree in syntax_trees("src/laconic", pattern=r"\n[ \t]+(from|import) .*laconic")
        if not str(path).startswith(LAZY_MODULES)
        for line, name in hidden_imports(tree)
    ]
    assert not hidden


@pytest.mark.parametrize(
    ("text", "is_hidden"),
    [
        ("def f():\n    from laconic.errors import UsageError", True),
        ("if TYPE_CHECKING:\n    import laconic.errors", True),
        ("from laconic.errors import UsageError", False),
        ("def f():\n    import torch", False),
    ],
)
def test_hidden_imports(text: str, is_hidden: bool) -> None:
    assert bool(list(hidden_imports(ast.parse(text)))) is is_hidden


UNSAFE_MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
UNSAFE_NAMES = {"torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save"}
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_OPTIONS = {("trust_remote_code", True), ("use_safetensors", False), ("allow_pickle", True)}


def unsafe_code(tree: ast.AST) -> list[str]:
    """Return what in a syntax tree could unpickle or run code from data."""
    names: list[str] = []
    for node in ast.walk(tree):
        names += [n for n in imported_modules(node) if n.split(".")[0] in UNSAFE_MODULES or n in UNSAFE_NAMES]
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE_NAMES:
            names.append(ast.unparse(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            names.append(node.func.id)
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            names += [f"{k}={v}" for k, v in UNSAFE_OPTIONS if (node.arg, node.value.value) == (k, v)]
    return names


def test_no_pickle() -> None:
    unsafe = {str(path): unsafe_code(tree) for path, tree in syntax_trees("src", "examples", "benchmarks", "tools")}
    assert unsafe, "no file was read"
    assert not {path: names for path, names in unsafe.items() if names}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml as y",
        "import torch; torch.load('x')",
        "from torch import save",
        "eval('1')",
        "numpy.load('x', allow_pickle=True)",
        "Auto.from_pretrained('x', trust_remote_code=True)",
        "Auto.from_pretrained('x', use_safetensors=False)",
    ],
)
def test_unsafe_code_finds(line: str) -> None:
    assert unsafe_code(ast.parse(line))


def test_unsafe_code_allows_eval_mode() -> None:
    assert not unsafe_code(ast.parse("module.eval(); model.load(); Auto.from_pretrained('x', use_safetensors=True)"))


def unconditional_skips(tree: ast.Module) -> list[int]:
    """Return lines that skip a test without a condition, or by importorskip, which would be silent in CI."""
    lines: list[int] = []

    def visit(node: ast.AST, conditional: bool) -> None:
        if isinstance(node, ast.Call | ast.Attribute):
            name = ast.unparse(node.func if isinstance(node, ast.Call) else node)
            bare = isinstance(node, ast.Attribute) or not (node.args or {k.arg for k in node.keywords} - {"reason"})
            if name in ("pytest.mark.skip", "unittest.skip") or (name == "pytest.mark.xfail" and bare):
                lines.append(node.lineno)
            if isinstance(node, ast.Call) and name in ("pytest.skip", "pytest.xfail") and not conditional:
                lines.append(node.lineno)
            if isinstance(node, ast.Call) and name == "pytest.importorskip":
                lines.append(node.lineno)
        inside = conditional or isinstance(node, ast.If | ast.IfExp | ast.ExceptHandler | ast.Match)
        for child in ast.iter_child_nodes(node):
            skips_decorator = isinstance(node, ast.Call) and child is node.func
            if not skips_decorator:
                visit(child, inside)

    visit(tree, False)
    return lines


def test_no_unconditional_skips() -> None:
    skips = {str(path): unconditional_skips(tree) for path, tree in syntax_trees("tests", pattern="skip|xfail")}
    assert not {path: lines for path, lines in skips.items() if lines}, (
        "use shared_dir() or needs() of tests/conftest.py"
    )


@pytest.mark.parametrize(
    ("text", "is_reported"),
    [
        ("@pytest.mark.skip\ndef test(): ...", True),
        ("@pytest.mark.skip(reason='later')\ndef test(): ...", True),
        ("@pytest.mark.xfail\ndef test(): ...", True),
        ("@pytest.mark.xfail(reason='later')\ndef test(): ...", True),
        ("pytestmark = [pytest.mark.skip]", True),
        ("def test():\n    pytest.skip('later')", True),
        ("x = pytest.importorskip('transformers')", True),
        ("def test():\n    if cold:\n        pytest.skip('cold')", False),
        ("@pytest.mark.skipif(cold, reason='cold')\ndef test(): ...", False),
    ],
)
def test_unconditional_skips(text: str, is_reported: bool) -> None:
    assert bool(unconditional_skips(ast.parse(text))) is is_reported
