"""Rules of the source tree: package layers, allowed libraries, no pickle, no unconditional skip."""

import ast
import re
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.house.source import imported_modules, syntax_trees, texts, walk

NUMERIC_PACKAGES = ("models", "generation", "latent", "compression", "nested", "training", "storage")
NUMERIC_LIBRARIES = {"laconic", "torch", "numpy", "safetensors", "jaxtyping", "pydantic"} | set(sys.stdlib_module_names)
OPTIONAL_IMPORTS = {
    ("src/laconic/models/checkpoints/weights.py", "huggingface_hub"),  # only when the name of a hub model is given
    ("src/laconic/models/gguf/header.py", "gguf"),  # only when a GGUF file is converted
    ("src/laconic/models/gguf/tensors.py", "gguf"),
    ("src/laconic/models/gguf/tokenizer.py", "tokenizers"),
    ("src/laconic/storage/lock.py", "filelock"),
}
ENTRY_POINTS = (
    "src/laconic/__init__.py",
    "src/laconic/__main__.py",
    "src/laconic/cli/",
    "src/laconic/console.py",
)  # these import lazily, to start fast


@pytest.mark.medium
def test_layers_imports_point_down() -> None:
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", command], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.medium
def test_layers_numeric_packages_use_few_libraries() -> None:
    others = [
        f"{path}:{node.lineno} {name}"
        for package in NUMERIC_PACKAGES
        for path, tree in syntax_trees(f"src/laconic/{package}")
        for node in walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported_modules(node)
        if name.split(".")[0] not in NUMERIC_LIBRARIES and (str(path), name.split(".")[0]) not in OPTIONAL_IMPORTS
    ]
    assert not others


def test_layers_no_hidden_imports() -> None:
    """No import of laconic inside a function or under TYPE_CHECKING, except at entry points."""
    hidden = [
        f"{path}:{node.lineno} {name}"
        for path, tree in syntax_trees("src/laconic", pattern=r"\n[ \t]+(from|import) .*laconic")
        if not str(path).startswith(ENTRY_POINTS)
        for outer in walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.If)
        for node in walk(outer)
        for name in imported_modules(node)
        if name.split(".")[0] == "laconic"
    ]
    assert not hidden


UNSAFE_MODULES = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
UNSAFE_NAMES = {"torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save"}
UNSAFE_BENCHMARK = "benchmarks/probes/peers.py"  # measures torch.save and torch.load beside laconic
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_OPTIONS = {("trust_remote_code", True), ("use_safetensors", False), ("allow_pickle", True)}


def find_unsafe(tree: ast.AST) -> list[str]:
    """Return what in a syntax tree could unpickle or run code from data."""
    uses: list[str] = []
    for node in walk(tree):
        uses += [n for n in imported_modules(node) if n.split(".")[0] in UNSAFE_MODULES or n in UNSAFE_NAMES]
        if isinstance(node, ast.Attribute) and node.attr in ("load", "save") and ast.unparse(node) in UNSAFE_NAMES:
            uses.append(ast.unparse(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            uses.append(node.func.id)
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            uses += [f"{k}={v}" for k, v in UNSAFE_OPTIONS if (node.arg, node.value.value) == (k, v)]
    return uses


@pytest.mark.medium
def test_no_pickle() -> None:
    uses = {str(path): find_unsafe(tree) for path, tree in syntax_trees("src", "examples", "benchmarks")}
    assert uses, "no file was read"
    assert not {path: names for path, names in uses.items() if names and path != UNSAFE_BENCHMARK}


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
def test_find_unsafe_detects(line: str) -> None:
    assert find_unsafe(ast.parse(line))


def test_find_unsafe_allows_module_eval() -> None:
    assert not find_unsafe(ast.parse("module.eval(); model.load(); Auto.from_pretrained('x', use_safetensors=True)"))


def unconditional_skips(tree: ast.Module) -> list[int]:
    """Return lines that skip a test unconditionally, or with importorskip, which is silent even where CI is set."""
    lines: list[int] = []

    def visit(node: ast.AST, conditional: bool) -> None:
        if isinstance(node, ast.Call | ast.Attribute):
            target = node.func if isinstance(node, ast.Call) else node
            skips = isinstance(target, ast.Attribute) and target.attr in ("skip", "xfail", "importorskip")
            name = ast.unparse(target) if skips else ""  # slow, so not for every call
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


def test_no_unconditional_skip() -> None:
    skips = {
        str(path): unconditional_skips(tree)
        for path, tree in syntax_trees("tests", pattern=r"\.(skip|xfail|importorskip)\b")
    }
    assert not {path: lines for path, lines in skips.items() if lines}, (
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
def test_unconditional_skips_detects(text: str, caught: bool) -> None:
    assert bool(unconditional_skips(ast.parse(text))) is caught


def test_every_file_has_a_docstring() -> None:
    missing = [
        str(path)
        for path, text in texts("src", "tests", "examples", "benchmarks")
        if not re.match(r'(#.*\n|\s)*r?"""\s*[^\s"]', text)
    ]
    assert not missing
