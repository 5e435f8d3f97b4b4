"""Size limits: 20 modules a package; 400 lines a file; 60 lines a function, without signature; eight parameters."""

import ast
from collections import Counter

from tests.house.source import syntax_trees, texts, walk

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PACKAGE_MODULES = 20  # beside __init__.py and subpackages
MAX_PARAMETERS = 8  # beside self, cls, and parameters named config or *_config
LONG_SIGNATURES: dict[str, str] = {  # reasons for more parameters, by file and function
    "evaluation/lm_eval_model.py __init__": "the arguments that lm-eval passes to a model",
    "latent/thoughts.py __init__": "the keys of a recipe's [latents], by keyword, all with defaults but one",
    "nested/cms/layer.py __init__": "the form of the MLP, by keyword, beside options of the levels",
    "nested/hope/model.py forward": "the arguments of Decoder.forward, and those of learning",
    "nested/optim/m3.py __init__": "options of a torch.optim optimizer",
}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function's body, without signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_limits_file_length() -> None:
    long = {
        str(path): lines for path, text in texts("src", "tools") if (lines := len(text.splitlines())) > MAX_FILE_LINES
    }
    assert not long


def test_limits_package_size() -> None:
    modules = Counter(path.parent for path, _ in texts("src") if path.name != "__init__.py")
    assert not {str(package): number for package, number in modules.items() if number > MAX_PACKAGE_MODULES}


def test_limits_function_length() -> None:
    long = {
        f"{path}:{node.lineno} {node.name}": lines
        for path, tree in syntax_trees("src", "tools")
        for node in walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := body_lines(node)) > MAX_FUNCTION_LINES
    }
    assert not long


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a function's parameters without self, cls and configs."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = [argument.arg for argument in arguments]
    return [name for name in names if name not in ("self", "cls", "config") and not name.endswith("_config")]


def test_limits_parameters() -> None:
    many = [
        f"{path.relative_to('src/laconic')} {node.name}"
        for path, tree in syntax_trees("src")
        for node in walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(parameters(node)) > MAX_PARAMETERS
    ]
    assert sorted(many) == sorted(LONG_SIGNATURES)


def test_limits_reference_length() -> None:
    """A reference implementation fits on one page: at most 120 lines."""
    references = {
        str(path): len(text.splitlines())
        for path, text in texts("src")
        if path.name.endswith("_reference.py") and "verification" not in path.parts
    }
    assert len(references) >= 10
    assert max(references.values()) <= 120, references
