"""R2: the file system refuses at any call of a commit; the old thing stays, nothing half lies about, the code is 74."""

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
def test_every_call_of_a_commit_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fault: int
) -> None:
    with monkeypatch.context() as patch:
        shim = Shim(patch)
        COMMITS[kind](tmp_path / "whole")
        calls = shim.decoder_calls
    assert {"os.fsync", "artifact.save_file", "os.rename" if kind == "folder" else "os.replace"} <= set(calls)
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
def test_synced_before_renamed_and_the_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    shim = Shim(monkeypatch)
    COMMITS[kind](tmp_path / "out")
    calls = [
        name for name in shim.decoder_calls if name in ("artifact.save_file", "os.fsync", "os.rename", "os.replace")
    ]
    rename, syncs = ("os.rename", 3) if kind == "folder" else ("os.replace", 1)
    assert calls == ["artifact.save_file", *["os.fsync"] * syncs, rename, "os.fsync"]


def test_a_real_limit_on_file_size(tmp_path: Path) -> None:
    """The kernel's own refusal, from inside safetensors' writer."""
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(DiskError, match="File too large while a tensor was written"):
            atomic.save_artifact(tmp_path / "out", {"a": torch.ones(1000)}, "cache", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 70, 30))  # type: ignore[attr-defined]
    atomic.save_artifact(tmp_path / "out", {"a": torch.ones(3)}, "cache", {})
    with pytest.raises(DiskError, match=r": 35 bytes are asked for to write 16, 30 are free"):
        atomic.save_artifact(tmp_path / "more", {"a": torch.ones(4)}, "cache", {})
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", COMMITS)
def test_a_file_in_the_way_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file/x", "file/x/y"):
        with pytest.raises(
            DiskError, match=rf"^{tmp_path}/{name}: {tmp_path}/file is a file, not a folder; choose anoth"
        ):
            COMMITS[kind](tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_error_that_is_none_of_the_file_system_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **named: Any) -> None:
        raise safetensors.SafetensorError("something else")

    monkeypatch.setattr(atomic, "save_file", fail)
    with pytest.raises(safetensors.SafetensorError, match="something else"):
        atomic.save_artifact(tmp_path / "out", {"a": torch.ones(3)}, "cache", {})
    assert list(tmp_path.iterdir()) == []
