"""R1: a run survives kill -9 and power cuts at any time; at most the current step is lost."""

from pathlib import Path

import pytest

from tests.trust import steps
from tests.trust.limits import LIMITS


@pytest.mark.parametrize("draw", range(LIMITS["kills"]))
def test_kill_at_a_random_time(tmp_path: Path, draw: int) -> None:
    steps.kill_at_a_random_time(tmp_path / "run", draw)


@pytest.mark.slow
def test_kill_five_hundred_times(tmp_path: Path) -> None:
    for draw in range(LIMITS["kills"], 500):
        steps.kill_at_a_random_time(tmp_path / f"run-{draw}", draw)


@pytest.mark.parametrize("name", steps.COMMIT_PARTS)
def test_kill_before_every_part_of_a_commit(tmp_path: Path, name: str) -> None:
    steps.kill_before(tmp_path / "run", name)


def test_power_cut(tmp_path: Path) -> None:
    steps.check_power_cut(tmp_path / "run")
