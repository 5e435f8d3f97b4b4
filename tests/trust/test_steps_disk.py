"""R2: any call of a commit, the lock or the metrics may fail; the step before stays valid."""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from laconic.errors import DiskError, LaconicError
from laconic.storage.run_dir import RunDirectory
from laconic.training.metrics import MetricsWriter
from tests.trust import steps
from tests.trust.shim import FAULTS, Shim


@pytest.mark.medium
@pytest.mark.parametrize("fault", FAULTS, ids=errno.errorcode.get)
def test_commit_step_when_any_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    run = steps.commit_steps(tmp_path / "run", 1)
    with run.lock(), monkeypatch.context() as patch:
        shim = Shim(patch)
        run.commit_step(2, steps.write_step(2), {})
        calls = shim.calls
    assert {"Path.mkdir", "atomic.save_file", "file.write", "os.fsync", "os.rename", "os.replace"} <= set(calls)
    rename = calls.index("os.rename")
    run = steps.commit_steps(tmp_path / "other", 1)
    for n in range(len(calls)):
        with run.lock(), monkeypatch.context() as patch:
            shim = Shim(patch)
            shim.fails, shim.fault = n, fault
            with pytest.raises(DiskError) as caught:
                run.commit_step(2, steps.write_step(2), {}, expected_bytes=1000)
        assert os.strerror(fault) in str(caught.value), f"call {n}, {calls[n]}"
        assert (" bytes to write, " in str(caught.value)) == (fault == errno.ENOSPC), f"call {n}, {calls[n]}"
        step = 2 if n > rename else 1
        steps.check_intact(run, step, step)
        shutil.rmtree(run.step_path(2), ignore_errors=True)


def test_commit_step_checks_free_space_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = steps.commit_steps(tmp_path / "run", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 70, 30))  # type: ignore[attr-defined]
    with run.lock(), pytest.raises(DiskError, match="220 bytes required to write 100, 30 are free"):
        run.commit_step(2, steps.write_step(2), {}, expected_bytes=100)
    monkeypatch.undo()
    steps.check_intact(run, 1, 1)


def test_lock_where_the_parent_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DiskError, match="file is a file"), RunDirectory(tmp_path / "file" / "run").lock():
        pass


def test_metrics_writer_on_a_full_disk(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.file.close()
    metrics.file = Path("/dev/full").open("ab")  # noqa: SIM115
    with pytest.raises(DiskError, match=r"metrics\.jsonl: No space left on device; 0 bytes to write, "):
        metrics.write({"step": 1})


def test_lock_when_any_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = steps.commit_steps(tmp_path / "run", 1)
    with monkeypatch.context() as patch:
        shim = Shim(patch)
        with run.lock():
            pass
    for n in range(len(shim.calls)):
        with monkeypatch.context() as patch:
            shim = Shim(patch)
            shim.fails, shim.fault = n, errno.EACCES
            with suppress(LaconicError, PermissionError), run.lock():  # filelock itself tries again
                pass
        steps.check_intact(run, 1, 1)
