"""The laws of the tree: floors, what core may import, no pickle, no unconditional skip, files that are one room."""

import ast
import re
import subprocess
import sys
import warnings

import pytest

from tests.conftest import REPO
from tests.house.source import imported, texts, trees

IN_CORE = {"laconic", "torch", "numpy", "safetensors", "jaxtyping"} | set(sys.stdlib_module_names)
EXCEPTED_IN_CORE = {
    ("src/laconic/models/weights.py", "huggingface_hub"),  # lazily, when a hub name is given in place of a folder
    ("src/laconic/storage/lock.py", "filelock"),  # whoever writes to a run holds its lock, and torch brings the library
}
# These may import laconic inside functions.
DOORS = (
    "src/laconic/__init__.py",
    "src/laconic/cli/main.py",
    "src/laconic/verbs/",
    "src/laconic/console.py",
    "src/laconic/serving/",
)


def test_every_import_points_down() -> None:
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", command], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_core_imports_only_its_four_libraries() -> None:
    strangers = [
        f"{path}:{node.lineno} {name}"
        for path, tree in trees("src/laconic/core")
        for node in ast.walk(tree)
        for name in imported(node)
        if name.split(".")[0] not in IN_CORE and (str(path), name.split(".")[0]) not in EXCEPTED_IN_CORE
    ]
    assert not strangers


def test_no_import_of_our_own_inside_a_function_but_at_the_doors() -> None:
    hidden = [
        f"{path}:{node.lineno} {name}"
        for path, tree in trees("src/laconic", word=r"\n[ \t]+(from|import) .*laconic")
        if not str(path).startswith(DOORS)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for name in imported(node)
        if name.split(".")[0] == "laconic"
    ]
    assert not hidden


UNSAFE_MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
UNSAFE_NAMES = {"torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save"}
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_OPTIONS = {("trust_remote_code", True), ("use_safetensors", False), ("allow_pickle", True)}


def unsafe(tree: ast.AST) -> list[str]:
    """What in a syntax tree could unpickle or run code from data."""
    found: list[str] = []
    for node in ast.walk(tree):
        found += [n for n in imported(node) if n.split(".")[0] in UNSAFE_MODULES or n in UNSAFE_NAMES]
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE_NAMES:
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            found.append(node.func.id)
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            found += [f"{k}={v}" for k, v in UNSAFE_OPTIONS if (node.arg, node.value.value) == (k, v)]
    return found


def test_no_pickle() -> None:
    found = {str(path): unsafe(tree) for path, tree in trees("src", "examples", "benchmarks")}
    assert found, "no file was read"
    assert not {path: what for path, what in found.items() if what}


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
def test_the_gate_against_pickle_sees(line: str) -> None:
    assert unsafe(ast.parse(line))


def test_the_gate_against_pickle_lets_modules_evaluate() -> None:
    assert not unsafe(ast.parse("module.eval(); model.load(); Auto.from_pretrained('x', use_safetensors=True)"))


def given_up(tree: ast.Module) -> list[int]:
    """Lines where a test is given up without a condition, or by importorskip, which is silent where CI is set."""
    lines: list[int] = []

    def look(node: ast.AST, conditional: bool) -> None:
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
                look(child, inside)

    look(tree, False)
    return lines


def test_no_test_is_given_up_without_a_condition() -> None:
    found = {str(path): given_up(tree) for path, tree in trees("tests", word="skip|xfail")}
    assert not {path: lines for path, lines in found.items() if lines}, (
        "use shared_dir() or needs() of tests/conftest.py"
    )


@pytest.mark.parametrize(
    ("text", "caught"),
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
def test_the_gate_against_skips_sees(text: str, caught: bool) -> None:
    assert bool(given_up(ast.parse(text))) is caught


def test_file_lengths_are_reported() -> None:
    long = {str(path): lines for path, text in texts("src") if (lines := len(text.splitlines())) > 300}
    if long:
        warnings.warn(f"files over 300 lines, perhaps two rooms: {long}", stacklevel=1)


def test_every_file_opens_with_a_sentence() -> None:
    silent = [
        str(path)
        for path, text in texts("src", "tests", "examples", "benchmarks")
        if not re.match(r'(#.*\n|\s)*r?"""\s*[^\s"]', text)
    ]
    assert not silent
