"""Checks of annotated shapes: in each file of tests of the first calls of every function, or of all calls."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from beartype import beartype

FEW = 4  # checks of a function in a file: two calls, of what goes in and of what comes out
EVERY = False  # set by whoever runs slow tests too
seen: Counter[tuple[str, str]] = Counter()
quiet: list[Any] = []


def sparing(asked: Callable[..., Any]) -> Callable[..., Any]:
    """The type checker for jaxtyping, which skips what has `__no_type_check__`; half of a test is checks otherwise."""
    key = (asked.__module__, asked.__qualname__)
    checked = functools.cache(lambda: beartype(asked))  # made when it is called: most functions are not

    @functools.wraps(asked)
    def counted(*args: Any, **named: Any) -> Any:
        found = checked()(*args, **named)
        seen[key] += 1
        if seen[key] == FEW and not EVERY:
            silence(*key)
        return found

    return counted


def silence(module: str, name: str) -> None:
    """No checks of this function until `again`."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    for inner in ("__func__", "fget", "func"):  # of class methods and properties
        found = getattr(found, inner, None) or found
    while found is not None and hasattr(found, "__wrapped__"):  # the check is innermost
        found.__no_type_check__ = True
        quiet.append(found)
        found = found.__wrapped__


def again() -> None:
    """Every function is checked anew."""
    seen.clear()
    while quiet:
        del quiet.pop().__no_type_check__
