"""Shapes are checked in every file, in the first calls of each function; `make test-all` checks all calls."""

import pytest
import torch
from jaxtyping import TypeCheckError

from laconic.models.positions import next_token
from tests import shapes

RIGHT, WRONG = torch.ones(2, 3), torch.ones(2, 3, 4)  # [B, V], and what is no such thing


def test_the_first_calls_of_a_file_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "EVERY", False)
    for _ in range(2):
        shapes.again()
        with pytest.raises(TypeCheckError):
            next_token(WRONG)
        next_token(RIGHT)
        with pytest.raises(TypeCheckError):
            next_token(WRONG)
        next_token(RIGHT)
        assert next_token(WRONG).shape == (2, 3)


def test_all_calls_are_checked_where_slow_tests_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "EVERY", True)
    shapes.again()
    for _ in range(shapes.FEW):
        next_token(RIGHT)
    with pytest.raises(TypeCheckError):
        next_token(WRONG)
