"""What tests of core share."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def as_users_call_it() -> Iterator[None]:
    """Without the shape checks of the test run, which would speak first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
