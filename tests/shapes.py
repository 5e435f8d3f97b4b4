"""Check annotated shapes on the first calls of every function in each test file, or on all calls."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from beartype import beartype

MAX_CHECKS = 4  # per function and test file: arguments and result of two calls
CHECK_ALL = False  # set when slow tests run too
check_counts: Counter[tuple[str, str]] = Counter()
disabled: list[Any] = []


def sparing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Type checker for jaxtyping that stops after MAX_CHECKS; checking every call would take half of the test time."""
    key = (function.__module__, function.__qualname__)
    checked = functools.cache(lambda: beartype(function))  # built on the first call: most functions are not called

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        result = checked()(*args, **options)
        check_counts[key] += 1
        if check_counts[key] == MAX_CHECKS and not CHECK_ALL:
            disable(*key)
        return result

    return call


def disable(module: str, name: str) -> None:
    """Turn off the checks of a function until `enable_all`."""
    function: Any = sys.modules[module]
    for part in name.split("."):
        function = vars(function).get(part) if hasattr(function, "__dict__") else None
    for attribute in ("__func__", "fget", "func"):  # class methods and properties
        function = getattr(function, attribute, None) or function
    while function is not None and hasattr(function, "__wrapped__"):  # the check is the innermost wrapper
        function.__no_type_check__ = True
        disabled.append(function)
        function = function.__wrapped__


def enable_all() -> None:
    """Turn on the checks of every function again."""
    check_counts.clear()
    while disabled:
        del disabled.pop().__no_type_check__
