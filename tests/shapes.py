"""Check annotated shapes on the first calls of every function in each test file, or on all calls."""

import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import jaxtyping
from jaxtyping import config, jaxtyped

MAX_CHECKS = 2  # calls per function and test file; checking every call would take half of the test time
CHECK_ALL = False  # set when slow tests run too
check_counts: Counter[tuple[str, str]] = Counter()


def install(*packages: str) -> None:
    """Check the shapes of the packages' functions, which nothing may have imported yet."""
    jaxtyping.jaxtyped = sparing  # the import hook decorates every function and class with it
    jaxtyping.install_import_hook(list(packages), "beartype.beartype")


def sparing(decorated: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """Take the place of `jaxtyping.jaxtyped`: build a check on the first call, since most functions are not called."""
    if decorated is None:
        return functools.partial(sparing, typechecker=typechecker)
    if inspect.isclass(decorated):
        if dataclasses.is_dataclass(decorated) and not hasattr(decorated.__init__, "__wrapped__"):
            decorated.__init__ = sparing(decorated.__init__, typechecker=typechecker)
        return decorated
    key = (decorated.__module__, decorated.__qualname__)
    build = functools.cache(lambda: jaxtyped(decorated, typechecker=typechecker))

    @functools.wraps(decorated)
    def call(*args: Any, **options: Any) -> Any:
        if config.jaxtyping_disable or (check_counts[key] >= MAX_CHECKS and not CHECK_ALL):
            return decorated(*args, **options)
        result = build()(*args, **options)
        check_counts[key] += 1
        return result

    return call


def enable_all() -> None:
    """Check the first calls of every function again."""
    check_counts.clear()
