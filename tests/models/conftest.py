"""Fixtures of the model tests."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def without_shape_checks() -> Iterator[None]:
    """Turn off jaxtyping's checks, which would raise before the library's own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
