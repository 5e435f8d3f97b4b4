"""Docstrings of the public names: parameters are described, and classes have an example."""

import inspect
import re
from collections.abc import Iterator

import pytest

import laconic
from laconic import interfaces

CLASSES = [name for name in laconic.__all__ if inspect.isclass(getattr(laconic, name))]
FUNCTIONS = [name for name in laconic.__all__ if inspect.isfunction(getattr(laconic, name))]
INTERFACE_METHODS = {
    method
    for value in vars(interfaces).values()
    if inspect.isclass(value)
    for method in vars(value)
    if not method.startswith("_")
}
REFERENCE = r"[Aa]rguments[^.]* are those of `|see `"


def parameters_of(function: object) -> list[str]:
    parameters = inspect.signature(function).parameters  # pyright: ignore[reportArgumentType]
    return [name for name in parameters if name not in ("self", "cls")]


def undescribed(function: object) -> list[str]:
    """Return the parameters that a docstring neither lists nor names in backticks."""
    text, parameters = inspect.getdoc(function) or "", parameters_of(function)
    if re.search(REFERENCE, text):
        return []
    return [name for name in parameters if not re.search(rf"^ +\*{{0,2}}{name}:|`{name}\b", text, re.MULTILINE)]


def public_methods(cls: type) -> Iterator[tuple[str, object]]:
    for name, value in vars(cls).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_describe_their_parameters(name: str) -> None:
    assert undescribed(getattr(laconic, name)) == []


@pytest.mark.parametrize("name", CLASSES)
def test_methods_describe_their_parameters(name: str) -> None:
    """Those of laconic.interfaces are described there; a method of one parameter may speak for itself."""
    missing = {
        method: undescribed(function)
        for method, function in public_methods(getattr(laconic, name))
        if method not in INTERFACE_METHODS and len(parameters_of(function)) > 1
    }
    assert {method: names for method, names in missing.items() if names} == {}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_docstrings(name: str) -> None:
    assert (getattr(laconic, name).__doc__ or "").strip()
