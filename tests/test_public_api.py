"""Every public name has a docstring with a runnable example."""

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import laconic
from tests.runs import train_tiny_run

NAMES = [name for name in laconic.__all__ if not name.startswith("__")]


def documented(name: str) -> tuple[str, dict[str, Any]]:
    """Return the docstring of a public name and the globals of its module."""
    value = getattr(laconic, name)
    return inspect.getdoc(value) or "", vars(importlib.import_module(value.__module__)).copy()


@pytest.mark.parametrize("name", NAMES)
def test_public_name_has_a_complete_docstring(name: str) -> None:
    doc, _ = documented(name)
    assert "Examples:" in doc
    value = getattr(laconic, name)
    if inspect.isfunction(value) and inspect.signature(value).parameters:
        assert "Args:" in doc
        assert "Raises:" in doc


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the examples load."""
    folder = tmp_path_factory.mktemp("examples")
    for method in ("kava", "autocompressor", "hope"):
        train_tiny_run(method, folder)
    return folder


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES)
def test_public_example_runs(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    doc, module_globals = documented(name)
    example = doctest.DocTestParser().get_doctest(doc, module_globals, name, None, 0)
    assert example.examples
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=output.append)
    assert result.failed == 0, "".join(output)
