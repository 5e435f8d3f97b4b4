"""The probes of benchmarks/reliability.py pass careful commands and report careless ones; one is laconic's."""

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import reliability
from benchmarks.probes import (
    artifacts,
    damage,
    disks,
    kills,
    promises,
    signals,
    summary,
    surroundings,
    works,
    writers,
)
from benchmarks.probes.counts import Counts
from benchmarks.probes.damage import Artifact
from benchmarks.probes.processes import INTERRUPTED, Moment, run_forked
from benchmarks.probes.works import Work, hash_files
from laconic.errors import LaconicError
from laconic.storage import atomic
from tests.conftest import REPO

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.medium]
CONTENT = b"a line of text\n" * 400
FILE = "out.txt"


def write_carefully() -> int:
    """Write a file atomically, or exit with the code of the error."""
    try:
        atomic.write_file_atomically(Path(FILE), lambda new: new.write_bytes(CONTENT))
    except LaconicError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def write_carelessly() -> int:
    """Write a file in place and in two pieces, and take one that exists for complete."""
    path = Path(FILE)
    if not path.exists():
        for _ in range(2):
            try:
                with path.open("ab") as file:
                    file.write(CONTENT[: len(CONTENT) // 2])
            except OSError:
                return disks.FULL
    return 0


def build_work(run: Callable[[], int]) -> Work:
    return Work("write", run, lambda folder: hash_files(folder, FILE), lambda folder: (folder / FILE).exists())


CAREFUL, CARELESS = build_work(write_carefully), build_work(write_carelessly)


def test_kills_find_torn_files(tmp_path: Path) -> None:
    good, bad = (kills.storm(work, tmp_path, 4, None, "repeat") for work in (CAREFUL, CARELESS))
    assert good.attempted == good.survived >= 4
    assert good.failures == []
    assert bad.survived < bad.attempted
    assert "differs from the uninterrupted command in out.txt" in bad.failures[0]


def test_kills_repeat_a_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills at a write, which do not depend on the clock."""
    monkeypatch.setattr(kills, "choose_moment", lambda chance, n, seconds: Moment(chance.randrange(max(1, n)), 0.0))
    bad = kills.storm(CARELESS, tmp_path, 4, None, "python repeat")
    trial = int(capsys.readouterr().err.partition("python repeat --trial ")[2].split()[0])
    again = kills.storm(CARELESS, tmp_path, 1, trial, "python repeat")
    assert again.failures[:1] == bad.failures[:1]


def test_disks_find_commands_that_ignore_errors(tmp_path: Path) -> None:
    good, bad = (disks.fill_disks(work, tmp_path, 2, None, "repeat") for work in (CAREFUL, CARELESS))
    assert (good.attempted, good.survived) == (2, 2)
    assert bad.survived < 2


def test_writers_find_mixed_files(tmp_path: Path) -> None:
    assert writers.race(CAREFUL, tmp_path, 2, None, "repeat").survived == 2


def test_signals_interrupt_commands(tmp_path: Path) -> None:
    counts = signals.interrupt_repeatedly(CAREFUL, tmp_path, 2, None, "repeat")
    assert (counts.attempted, counts.survived, counts.lost) == (2, 2, 0)


def test_damage_tells_refused_from_silent(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / FILE).write_bytes(CONTENT)

    def refuse() -> int:
        if Path(FILE).read_bytes() != CONTENT:
            sys.stderr.write(f"{FILE} is damaged\n")
            return 76
        return 0

    def show() -> int:
        os.write(1, Path(FILE).read_bytes())
        return 0

    def crash() -> int:
        return 0 if Path(FILE).read_bytes() == CONTENT else 70

    careful, careless, broken = (
        damage.spoil_repeatedly(Artifact("file", tmp_path / "source", (FILE,), read), tmp_path, 4, None, "repeat")
        for read in (refuse, show, crash)
    )
    assert (careful.detected, careful.silent, careful.survived) == (4, 0, 4)
    assert (careless.detected, careless.silent, careless.survived) == (0, 4, 0)
    assert broken.survived == 0
    assert "exit code 70" in broken.failures[0]


def test_stop_training_ends_if_training_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not stopped by the signal: exit code 66"):
        artifacts.stop_training(tmp_path, tmp_path / "stopped", 0)  # there is no recipe


def test_limit_costs_counts_cpu_time(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    ending = run_forked(lambda: resource.getrlimit(resource.RLIMIT_CPU)[0], tmp_path / "inside", promises.limit_costs)
    assert ending.code == 60


def test_kills_of_a_command_line(tmp_path: Path) -> None:
    """The others run in `python benchmarks/reliability.py`."""
    works.write_inputs(tmp_path)
    counts = kills.storm(works.build_answers(tmp_path, "stories260k"), tmp_path, 1, None, "repeat")
    assert counts.attempted == counts.survived >= 1


@pytest.mark.slow
@pytest.mark.loopback
def test_reliability_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["reliability.py", "--quick"])
    with pytest.raises(SystemExit) as end:
        reliability.main()
    assert not end.value.code


def test_reliability_table_adds_up_and_leaves_out_empty_columns(tmp_path: Path) -> None:
    def count(subject: int, place: Path, number: int, trial: int | None, command: str) -> Counts:
        return Counts(f"row {subject}", command, attempted=number, survived=number - 1, lost=0, failures=["it broke"])

    rows = {f"row {n}": reliability.Row(count, n, 10 * n) for n in (1, 2)}
    lines = reliability.run_probe("kills", rows, "", None, tmp_path).markdown().splitlines()
    assert "| command | attempted | survived | committed work lost |" in lines
    assert "| **laconic, all** | 30 | 28 | 0 |" in lines
    assert lines.count("- it broke") == 2


def test_reliability_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reliability.py", "--only", "kill"])
    with pytest.raises(SystemExit):
        reliability.parse_arguments()
    assert "--only kill: expected kills, damage" in capsys.readouterr().err


def test_surroundings_are_named_once() -> None:
    names = [case.name for case in surroundings.SURROUNDINGS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("test", [test for line in summary.LINES for test in line.tests])
def test_summary_names_tests_that_exist(test: str) -> None:
    file, _, prefix = test.partition("::")
    assert f"\ndef {prefix or 'test_'}" in (REPO / "tests" / file).read_text(encoding="utf-8")
