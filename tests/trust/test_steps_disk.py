"""R2: the file system refuses at any call of a step's commit, of the lock and of the metrics: the step before stays."""

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


@pytest.mark.parametrize("fault", FAULTS, ids=errno.errorcode.get)
def test_every_call_of_a_commit_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    run = steps.committed(tmp_path / "run", 1)
    with run.lock(), monkeypatch.context() as patch:
        shim = Shim(patch)
        run.commit_step(2, steps.fill(2), {})
        calls = shim.decoder_calls
    assert {"Path.mkdir", "artifact.save_file", "file.write", "os.fsync", "os.rename", "os.replace"} <= set(calls)
    rename = calls.index("os.rename")
    run = steps.committed(tmp_path / "other", 1)
    for n in range(len(calls)):
        with run.lock(), monkeypatch.context() as patch:
            shim = Shim(patch)
            shim.fails, shim.fault = n, fault
            with pytest.raises(DiskError) as caught:
                run.commit_step(2, steps.fill(2), {}, expected_bytes=1000)
        assert os.strerror(fault) in str(caught.value), f"call {n}, {calls[n]}"
        assert (" bytes to write, " in str(caught.value)) == (fault == errno.ENOSPC), f"call {n}, {calls[n]}"
        there = 2 if n > rename else 1
        steps.whole(run, there, there)
        shutil.rmtree(run.step_path(2), ignore_errors=True)


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = steps.committed(tmp_path / "run", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 70, 30))  # type: ignore[attr-defined]
    with run.lock(), pytest.raises(DiskError, match=r"/steps: 220 bytes are asked for to write 100, 30 are free$"):
        run.commit_step(2, steps.fill(2), {}, expected_bytes=100)
    monkeypatch.undo()
    steps.whole(run, 1, 1)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    told = "file is a file, not a folder; choose another place"
    with pytest.raises(DiskError, match=told), RunDirectory(tmp_path / "file" / "run").lock():
        pass


def test_metrics_on_a_full_disk(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.file.close()
    metrics.file = Path("/dev/full").open("ab")  # noqa: SIM115
    with pytest.raises(DiskError, match=r"metrics\.jsonl: No space left on device; 0 bytes to write, "):
        metrics.write({"step": 1})


def test_a_lock_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = steps.committed(tmp_path / "run", 1)
    with monkeypatch.context() as patch:
        shim = Shim(patch)
        with run.lock():
            pass
    for n in range(len(shim.decoder_calls)):
        with monkeypatch.context() as patch:
            shim = Shim(patch)
            shim.fails, shim.fault = n, errno.EACCES
            with suppress(LaconicError, PermissionError), run.lock():  # filelock itself tries again
                pass
        steps.whole(run, 1, 1)
