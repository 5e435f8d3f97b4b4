"""Atomic files and folders, finite tensors, and single-file artifacts with a digest."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from laconic.errors import (
    BusyError,
    CorruptArtifactError,
    DiskError,
    InputError,
    NonFiniteError,
)
from laconic.storage import atomic, temporary

FILE = "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_check_finite(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(6, 20)
    atomic.check_finite("w", x.to(dtype))
    x[5, 17] = bad
    with pytest.raises(NonFiniteError, match=r"w: 1 value not finite, first at \[5, 17\]"):
        atomic.check_finite("w", x.to(dtype))
    x[2, 19] = bad
    with pytest.raises(NonFiniteError, match=r"2 values not finite, first at \[2, 19\]"):
        atomic.check_finite("w", x.to(dtype))


def test_check_finite_accepts_integers_and_empty_tensors() -> None:
    for tensor in (torch.ones(3, dtype=torch.int64), torch.ones(0), torch.ones(2, dtype=torch.bool), torch.ones(())):
        atomic.check_finite("w", tensor)
    atomic.check_finite("w", torch.full((3,), 3.4e38))  # their sum would be infinite


def test_save_tensors_round_trip(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    tensors = {
        "transposed": x.t(),
        "same": x,
        "again": x,
        "part": x[1:3],
        "wide": x[:1].expand(3, 6),
        "half": x.bfloat16(),
    }
    atomic.save_tensors(tmp_path / FILE, tensors, {})
    loaded = atomic.open_tensors(tmp_path / FILE, tensors)
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    with pytest.raises(NonFiniteError, match="bad: 1 value not finite"):
        atomic.save_tensors(tmp_path / "other", {"bad": torch.tensor([float("nan")])}, {})


def test_save_tensors_of_equal_contents_are_equal_bytes(tmp_path: Path) -> None:
    """The safetensors library writes metadata in the order of a hash map with a random seed."""
    metadata = {"laconic": '{"a":"ü\\n\x7f"}', "digest": "0", "format": "pt", "kind": "memory"}
    for i in range(8):
        atomic.save_tensors(tmp_path / str(i), {"b": torch.ones(3), "a": torch.zeros(2, 2)}, metadata)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    header = atomic.read_safetensors_header(tmp_path / "0")
    assert [*header.metadata.items()] == sorted(metadata.items())
    with safe_open(tmp_path / "0", framework="pt") as file:
        assert file.metadata() == metadata
        assert torch.equal(file.get_tensor("b"), torch.ones(3))


@pytest.mark.parametrize("umask", [0o002, 0o027, 0o077])
def test_write_follows_the_umask(tmp_path: Path, umask: int) -> None:
    def write(folder: Path) -> None:
        atomic.save_tensors(folder / FILE, {"a": torch.ones(2)}, {})
        (folder / "config.json").write_text("{}")

    before = os.umask(umask)
    try:
        atomic.write_folder_atomically(tmp_path / "out", write)
        atomic.save_artifact(tmp_path / "cache", {"a": torch.ones(2)}, "cache", {})
    finally:
        os.umask(before)
    modes = {
        p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "out", tmp_path / "cache", *(tmp_path / "out").iterdir())
    }
    mode = 0o666 & ~umask
    assert modes == {"out": 0o777 & ~umask, "cache": mode, FILE: mode, "config.json": mode}


def test_write_folder_is_complete_or_absent(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with pytest.raises(RuntimeError, match="interrupted"):
        atomic.write_folder_atomically(target, lambda folder: write_half(folder))
    assert list(target.parent.iterdir()) == []
    atomic.write_folder_atomically(target, lambda folder: (folder / "a").write_text("1") and None)
    assert [p.name for p in target.parent.iterdir()] == ["out"]
    assert (target / "a").read_text() == "1"


def write_half(folder: Path) -> None:
    (folder / "a").write_text("1")
    raise RuntimeError("interrupted")


def test_write_folder_into_an_empty_one_only(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    atomic.write_folder_atomically(tmp_path / "empty", lambda folder: (folder / "a").write_text("1") and None)
    (tmp_path / "file").write_text("mine")
    for name in ("empty", "file"):
        with pytest.raises(BusyError, match="not empty"):
            atomic.write_folder_atomically(tmp_path / name, write_half)
    assert (tmp_path / "file").read_text() == "mine"
    assert (tmp_path / "empty" / "a").read_text() == "1"


def test_write_folder_created_by_another_process_meanwhile(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("1")

    with pytest.raises(BusyError, match="not empty"):
        atomic.write_folder_atomically(tmp_path / "out", write)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["out", "theirs"]


def test_write_file_is_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    atomic.write_file_atomically(path, lambda new: new.write_text("1") and None)
    with pytest.raises(DiskError, match="No such file or directory"):
        atomic.write_file_atomically(path, lambda new: new.write_text("2") and (tmp_path / "none").unlink())
    assert path.read_text() == "1"
    atomic.write_file_atomically(path, lambda new: new.write_text("2") and None)
    assert path.read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]


def test_write_file_into_a_pipe_leaves_the_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("pipe")
    assert temporary.follow_link(tmp_path / "link") == tmp_path / "link"  # /dev/stdout leads to no path
    with ThreadPoolExecutor() as pool:
        text = pool.submit(pipe.read_text)
        atomic.write_named_file(pipe, lambda new: new.write_text("all of it"))
        assert text.result(60) == "all of it"
    assert pipe.is_fifo()
    atomic.write_text_atomically(pipe, "a file that no user named replaces what is there")
    assert pipe.is_file()


def test_artifact_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link.safetensors"
    link.symlink_to("disk/memory.safetensors")  # which does not exist yet
    for value in (1.0, 2.0):
        atomic.save_artifact(link, {"x": torch.tensor([value])}, "memory", {}, is_named=True)
        assert link.is_symlink()
        tensors, _ = atomic.load_artifact(tmp_path / "disk" / "memory.safetensors", "memory")
        assert tensors["x"].item() == value


def test_check_new_folder_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("1")
    with pytest.raises(BusyError, match="full exists and is not empty"):
        atomic.check_new_folder(tmp_path / "full")
    with pytest.raises(DiskError, match="required to write"):
        atomic.check_new_folder(tmp_path / "new" / "inner", 10**18)
    atomic.check_new_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_temporary_files_name_their_target(tmp_path: Path) -> None:
    names: list[str] = []
    for target in ("memory.safetensors", "ü" * 120):
        atomic.write_file_atomically(tmp_path / target, lambda new: (names.append(new.parent.name), new.touch()))
    assert names[0].startswith(".tmp-memory.safetensors-")
    assert names[1].startswith(".tmp-üüü")
    for name in (".tmp-file", ".tmp-folder/inner"):
        (tmp_path / name).mkdir(parents=True)
    atomic.remove_temporary(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_write_checks_free_space(tmp_path: Path) -> None:
    for commit in (atomic.write_folder_atomically, atomic.write_file_atomically):
        with pytest.raises(DiskError, match=r"required to write 1,000,000,000,000,000,000, [\d,]+ are free"):
            commit(tmp_path / "out", write_half, 10**18)
    assert list(tmp_path.iterdir()) == []


TENSORS: dict[str, Tensor] = {
    "keys": torch.arange(24.0).view(2, 3, 4),
    "live": torch.tensor([True, False]),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "one": torch.tensor(7),
    "none": torch.zeros(0, 4),
}


def test_artifact_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    for _ in range(2):  # a second time replaces it
        atomic.save_artifact(path, TENSORS, "cache", {"model": "3f9a"})
    tensors, metadata = atomic.load_artifact(path, "cache")
    assert metadata == {"format": 1, "kind": "cache", "model": "3f9a"}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_artifact_of_another_kind_or_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.safetensors"
    with pytest.raises(InputError, match=r"no cache\.safetensors"):
        atomic.load_artifact(path, "cache")
    atomic.save_artifact(path, TENSORS, "cache", {})
    assert atomic.read_artifact_kind(path) == "cache"
    with pytest.raises(CorruptArtifactError, match=r"is a cache, expected a memory \(summary vectors\)"):
        atomic.load_artifact(path, "memory")
    monkeypatch.setattr(atomic, "FORMAT_VERSION", 2)
    atomic.save_artifact(path, TENSORS, "cache", {})
    monkeypatch.setattr(atomic, "FORMAT_VERSION", 1)
    with pytest.raises(CorruptArtifactError, match="cache of format 2, expected format 1"):
        atomic.load_artifact(path, "cache")
    atomic.save_tensors(path, TENSORS, {"format": "pt"})
    with pytest.raises(CorruptArtifactError, match="no metadata of laconic"):
        atomic.load_artifact(path, "cache")


@pytest.mark.parametrize("length", [4, 100, -1])
def test_artifact_that_was_cut_off_is_reported_as_damaged(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cache.safetensors"
    atomic.save_artifact(path, TENSORS, "cache", {})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptArtifactError, match=r"cache\.safetensors: .*cut off .*; use an intact copy$") as error:
        atomic.read_artifact_kind(path)
    assert "download" not in str(error.value)


def test_artifact_refuses_nonfinite_tensors(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="keys: 1 value not finite"):
        atomic.save_artifact(tmp_path / "x", {"keys": torch.tensor([1.0, float("nan")])}, "cache", {})
    assert list(tmp_path.iterdir()) == []


def test_temporary_folder_that_another_writer_removes_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer of the same target takes a folder without a lock for one that a killed writer left."""
    open_file, removed = os.open, list[str]()

    def open_late(path: str, flags: int, *args: int) -> int:
        if ".tmp-" in str(path) and not removed:
            os.rmdir(path)
            removed.append(str(path))
        return open_file(path, flags, *args)

    monkeypatch.setattr(temporary.os, "open", open_late)
    atomic.write_text_atomically(tmp_path / "a.txt", "text")
    assert removed
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_write_file_atomically_where_there_are_no_folder_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary, "fcntl", None)  # as on Windows
    path = tmp_path / "a.json"
    temporary.make_temporary_path(path).mkdir()
    atomic.write_file_atomically(path, lambda new: new.write_text("{}"))
    assert path.read_text() == "{}"
    assert len(list(tmp_path.iterdir())) == 2  # what a killed writer left stays
