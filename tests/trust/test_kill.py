"""R1: a run outlives kill -9 and power cuts at any time; at most the step under way is lost."""

from pathlib import Path

import pytest

from tests.trust import steps
from tests.trust.limits import LIMITS


@pytest.mark.parametrize("draw", range(LIMITS["kills"]))
def test_killed_at_a_drawn_time(tmp_path: Path, draw: int) -> None:
    steps.killed_at_a_drawn_time(tmp_path / "run", draw)


@pytest.mark.slow
def test_killed_five_hundred_times(tmp_path: Path) -> None:
    for draw in range(LIMITS["kills"], 500):
        steps.killed_at_a_drawn_time(tmp_path / f"run-{draw}", draw)


@pytest.mark.parametrize("name", steps.BEGINNINGS)
def test_killed_before_each_step_of_a_commit(tmp_path: Path, name: str) -> None:
    steps.killed_before(tmp_path / "run", name)


def test_a_power_cut(tmp_path: Path) -> None:
    steps.survives_a_power_cut(tmp_path / "run")
