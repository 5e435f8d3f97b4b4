"""Shape checks run on the first calls of each function in every file; `make test-all` checks all calls."""

import pytest
import torch
from jaxtyping import TypeCheckError

from laconic.models.next_token import next_token
from tests import shapes

RIGHT, WRONG = torch.ones(2, 3), torch.ones(2, 3, 4)  # [B, V], and another shape


def test_first_calls_of_a_file_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "CHECK_ALL", False)
    for _ in range(2):
        shapes.enable_all()
        with pytest.raises(TypeCheckError):
            next_token(WRONG)
        next_token(RIGHT)
        with pytest.raises(TypeCheckError):
            next_token(WRONG)
        next_token(RIGHT)
        assert next_token(WRONG).shape == (2, 3)


def test_all_calls_are_checked_if_slow_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "CHECK_ALL", True)
    shapes.enable_all()
    for _ in range(shapes.MAX_CHECKS):
        next_token(RIGHT)
    with pytest.raises(TypeCheckError):
        next_token(WRONG)
