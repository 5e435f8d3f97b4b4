"""R2: any file-system call of an atomic write may fail; the old file stays and no partial one remains."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from laconic.errors import DiskError
from laconic.storage import atomic
from tests.trust.shim import FAULTS, Shim


def write_folder(folder: Path) -> None:
    atomic.save_tensors(folder / "model.safetensors", {"a": torch.ones(3)}, {"format": "pt"})
    with (folder / "config.json").open("w") as file:
        file.write("{}")


def save_file(path: Path) -> None:
    atomic.save_artifact(path, {"a": torch.ones(3)}, "cache", {"version": "new"})


COMMITS: dict[str, Callable[[Path], None]] = {
    "folder": lambda target: atomic.write_folder_atomically(target, write_folder),
    "file": save_file,
}


@pytest.mark.parametrize("fault", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize("kind", COMMITS)
def test_atomic_write_when_any_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fault: int
) -> None:
    with monkeypatch.context() as patch:
        shim = Shim(patch)
        COMMITS[kind](tmp_path / "whole")
        calls = shim.calls
    assert {"os.fsync", "atomic.save_file", "os.rename" if kind == "folder" else "os.replace"} <= set(calls)
    last = max(i for i, name in enumerate(calls) if name in ("os.rename", "os.replace"))
    for n in range(len(calls)):
        home = tmp_path / f"{n}"
        home.mkdir()
        if kind == "file":
            atomic.save_artifact(home / "out", {"a": torch.zeros(3)}, "cache", {"version": "old"})
        with monkeypatch.context() as patch:
            shim = Shim(patch)
            shim.fails, shim.fault = n, fault
            with pytest.raises(DiskError) as caught:
                COMMITS[kind](home / "out")
        assert os.strerror(fault) in str(caught.value)
        assert (" bytes to write, " in str(caught.value)) == (fault == errno.ENOSPC)
        exists = [p.name for p in home.iterdir()]
        if kind == "folder":
            assert exists == (["out"] if n > last else []), f"call {n}, {calls[n]}"
        else:
            assert exists == ["out"], f"call {n}, {calls[n]}"
            version = atomic.load_artifact(home / "out", "cache")[1]["version"]
            assert version == ("new" if n > last else "old"), f"call {n}, {calls[n]}"


@pytest.mark.parametrize("kind", COMMITS)
def test_atomic_write_order_of_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    shim = Shim(monkeypatch)
    COMMITS[kind](tmp_path / "out")
    calls = [name for name in shim.calls if name in ("atomic.save_file", "os.fsync", "os.rename", "os.replace")]
    rename, syncs = ("os.rename", 3) if kind == "folder" else ("os.replace", 1)
    assert calls == ["atomic.save_file", *["os.fsync"] * syncs, rename, "os.fsync"]


def test_atomic_write_beyond_a_file_size_limit(tmp_path: Path) -> None:
    """The kernel refuses a write inside safetensors."""
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(DiskError, match="File too large while writing a tensor"):
            atomic.save_artifact(tmp_path / "out", {"a": torch.ones(1000)}, "cache", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_atomic_write_names_required_and_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 70, 30))  # type: ignore[attr-defined]
    atomic.save_artifact(tmp_path / "out", {"a": torch.ones(3)}, "cache", {})
    with pytest.raises(DiskError, match="35 bytes required to write 16, 30 are free"):
        atomic.save_artifact(tmp_path / "more", {"a": torch.ones(4)}, "cache", {})
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", COMMITS)
def test_atomic_write_below_a_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file/x", "file/x/y"):
        with pytest.raises(DiskError, match="file is a file"):
            COMMITS[kind](tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_atomic_write_passes_other_errors_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise safetensors.SafetensorError("something else")

    monkeypatch.setattr(atomic, "save_file", fail)
    with pytest.raises(safetensors.SafetensorError, match="something else"):
        atomic.save_artifact(tmp_path / "out", {"a": torch.ones(3)}, "cache", {})
    assert list(tmp_path.iterdir()) == []
