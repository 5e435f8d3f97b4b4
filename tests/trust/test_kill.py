"""R1: a run survives kill -9 and power cuts at any time; at most the current step is lost."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from laconic.storage import atomic, temporary
from tests.trust import steps
from tests.trust.children import Child, die
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


@pytest.mark.parametrize("commit", [atomic.write_folder_atomically, atomic.write_file_atomically])
def test_atomic_write_removes_what_killed_writers_left(tmp_path: Path, commit: Callable[..., None]) -> None:
    """Writers of the same target that live are left alone."""

    def wait(tell: Callable[[int], None]) -> None:
        commit(tmp_path / "out", lambda new: (tell(0), time.sleep(60)))

    writer = Child(wait)
    writer.wait_for(0)
    living = list(tmp_path.iterdir())
    assert Child(lambda tell: commit(tmp_path / "out", lambda new: die())).end() == 128 + signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="stop"):
        commit(tmp_path / "out", raise_error)
    assert list(tmp_path.iterdir()) == living
    writer.signal(signal.SIGKILL)
    writer.end()
    temporary.remove_abandoned(tmp_path / "out-2")
    assert list(tmp_path.iterdir()) == living, "of another target"
    temporary.remove_abandoned(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def raise_error(new: Path) -> None:
    raise ValueError("stop")
