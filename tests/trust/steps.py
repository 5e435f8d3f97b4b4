"""Small steps of a run, and the questions that each failure asks of it; tests/trust/test_net.py asks them again with a
guard taken away."""

import os
import random
import signal
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from laconic.errors import BusyError, CorruptArtifactError, NonFiniteError
from laconic.storage import atomic, manifest
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from tests.trust.children import Child, die


def fill(n: int, width: int = 64) -> Callable[[ManifestWriter], None]:
    """A step whose every tensor says its number."""

    def write(files: ManifestWriter) -> None:
        files.add_tensors("model.safetensors", {"a": torch.full((width, width), float(n)), "b": torch.arange(n)})
        files.add_tensors("optimizer.safetensors", {"a": torch.full((width,), float(n))})
        files.add_json("progress.json", {"step": n})

    return write


def committed(path: Path, *steps: int) -> RunDirectory:
    run = RunDirectory(path)
    with run.lock():
        for n in steps:
            run.commit_step(n, fill(n), {"data": "d"})
            run.prune_steps(())
    return run


def whole(run: RunDirectory, least: int, most: int) -> None:
    """The next start finds a step in [least, most] whose tensors are its own, and leaves nothing half."""
    temporary = list(run.path.rglob(".tmp-*"))
    assert len(temporary) <= 1, f"{temporary}"
    with run.lock():
        found = run.latest_valid_step()
        assert [p for p in run.path.rglob(".*") if p.name.startswith((".tmp-", ".trash-"))] == []
    assert found is not None
    assert list(run.steps_folder.glob(".bad-*")) == [], "a step that was half written had a name"
    assert least <= found.step <= most, f"step {found.step} is newest, {least} was committed"
    tensors = atomic.open_tensors(found.path / "model.safetensors", ["a", "b"])
    assert bool((tensors["a"] == found.step).all())
    assert len(tensors["b"]) == found.step


def killed_at_a_drawn_time(path: Path, draw: int) -> None:
    """R1: a writer that commits step after step is killed at any time."""

    def write(tell: Callable[[int], None]) -> None:
        with run.lock():
            for n in range(2, 10_000):
                run.commit_step(n, fill(n), {"data": "d"})
                run.prune_steps(())
                tell(n)

    run = committed(path, 1)
    child = Child(write)
    chance = random.Random(draw)
    child.wait_for(2 + chance.randrange(3))
    time.sleep(chance.uniform(0, 0.02))
    child.signal(signal.SIGKILL)
    assert child.end() == 128 + signal.SIGKILL
    whole(run, child.last, child.last + 1)


# What each of the seven steps of a commit begins with.
BEGINNINGS: dict[str, tuple[Any, str]] = {
    "room": (atomic, "ask_room"),
    "folder": (Path, "mkdir"),
    "finite": (atomic, "check_finite"),
    "files": (atomic, "save_file"),
    "manifest": (ManifestWriter, "seal"),
    "rename": (os, "rename"),
    "latest": (RunDirectory, "_point"),
}


def killed_before(path: Path, name: str) -> None:
    """R1: the process ends where one step of a commit would begin."""
    owner, what = BEGINNINGS[name]

    def write(tell: Callable[[int], None]) -> None:
        with run.lock():
            setattr(owner, what, lambda *args, **named: die())
            run.commit_step(3, fill(3), {"data": "d"})

    run = committed(path, 1, 2)
    assert Child(write).end() == 128 + signal.SIGKILL
    there = 3 if name == "latest" else 2
    whole(run, there, there)


class Recorder:
    """What reaches the disk: every fsync by inode, every rename; `lose` is the power cut that keeps nothing else."""

    def __init__(self) -> None:
        self.synced: dict[int, list[int]] = {}  # inode -> events at which it was synced
        self.renamed: list[tuple[int, Path, Path]] = []
        self.events: list[str] = []

    @contextmanager
    def listening(self) -> Iterator["Recorder"]:
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def on_fsync(fd: int) -> None:
            fsync(fd)
            there = os.fstat(fd)
            self.synced.setdefault(there.st_ino, []).append(len(self.events))
            self.events.append("folder" if stat.S_ISDIR(there.st_mode) else "file")

        def on_rename(old: Any, new: Any) -> None:
            rename(old, new)
            self.renamed.append((len(self.events), Path(old), Path(new)))
            self.events.append("rename")

        os.fsync, os.rename = on_fsync, on_rename
        try:
            yield self
        finally:
            os.fsync, os.rename, os.replace = fsync, rename, replace

    def lose(self, folder: Path) -> None:
        """Files that were not synced are empty; names in a folder not synced afterwards are gone."""
        for path in [p for p in folder.rglob("*") if p.is_file()]:
            if path.stat().st_ino not in self.synced:
                path.write_bytes(b"")
        for place in [p for p in folder.rglob("*") if p.is_dir()]:
            if place.stat().st_ino not in self.synced:
                for path in place.iterdir():
                    path.unlink()
        for at, old, new in self.renamed:
            if not any(when > at for when in self.synced.get(new.parent.stat().st_ino, [])):
                new.rename(old)


def survives_a_power_cut(path: Path) -> None:
    """R1: what a commit has promised is on the disk, in the order write, fsync, rename, fsync."""
    run = committed(path, 1)
    recorder = Recorder()
    with run.lock(), recorder.listening():
        run.commit_step(2, fill(2), {"data": "d"})
    rename = recorder.events.index("rename")
    assert recorder.events[:rename].count("file") == 4, "three files and the manifest before the rename"
    assert recorder.events[rename - 1] == "folder"
    assert recorder.events[rename + 1] == "folder"
    recorder.lose(run.step_path(2))
    recorder.lose(run.steps_folder)
    whole(run, 2, 2)


def places(run: RunDirectory, step: int) -> list[tuple[Path, int]]:
    """Every file of a step with its bytes, the manifest among them."""
    return [(path, path.stat().st_size) for path in sorted(run.step_path(step).iterdir())]


def drawn(run: RunDirectory, step: int, n: int, seed: int) -> list[tuple[Path, int]]:
    """`n` bytes of a step, half of them in small files and headers, which most draws would never meet."""
    chance = random.Random(seed)
    files = places(run, step)
    found: list[tuple[Path, int]] = []
    for i in range(n):
        path, size = chance.choice(files)
        found.append((path, chance.randrange(min(size, 400) if i % 2 else size)))
    return found


def passed_over(run: RunDirectory) -> bool:
    """Whether step 2, spoilt, is not handed out and step 1 is, with a warning of one line."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = run.latest_valid_step()
        except manifest.NewerFormatError:  # a flip made its format a later one, which is not passed over but refused
            return True
        except CorruptArtifactError:
            return False
    lines = [str(warning.message) for warning in said]
    return found is not None and found.step == 1 and len(lines) == 1 and "\n" not in lines[0]


def every_cut_is_found(path: Path, n: int) -> None:
    """R5: a file of a step cut short anywhere."""
    run = committed(path, 1, 2)
    missed = []
    for file, at in drawn(run, 2, n, 5):
        content = file.read_bytes()
        file.write_bytes(content[:at])
        if not passed_over(run):
            missed.append((file.name, at))
        file.write_bytes(content)
    assert missed == []
    assert not passed_over(run)


def every_flip_is_found(path: Path, n: int) -> None:
    """R5: any bit of a step turned."""
    run = committed(path, 1, 2)
    missed = []
    for i, (file, at) in enumerate(drawn(run, 2, n, 6)):
        content = file.read_bytes()
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << i % 8]) + content[at + 1 :])
        if not passed_over(run):
            missed.append((file.name, at))
        file.write_bytes(content)
    assert missed == []


def deleting_waits_for_a_good_step(path: Path) -> None:
    """R5: a step that went bad as it was written does not cost the ones before."""
    run = RunDirectory(path)
    with run.lock(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (1, 2, 3):
            run.commit_step(n, fill(n), {})
        for n in (2, 3):
            (run.step_path(n) / "model.safetensors").write_bytes(b"")
        run.prune_steps(())
        found = run.latest_valid_step()
    assert found is not None
    assert found.step == 1


def one_writer(path: Path) -> None:
    """R13: of two processes that want a run at once one has it and the other ends with 73, within a second."""

    def write(tell: Callable[[int], None]) -> None:
        with run.lock():
            tell(1)
            time.sleep(1.5)

    run = committed(path, 1)
    first = Child(write)
    first.wait_for(1)
    began = time.monotonic()
    second = Child(write)
    code = second.end()
    took = time.monotonic() - began
    first.signal(signal.SIGKILL)
    first.end()
    assert code == BusyError.exit_code
    assert took < 1
    whole(run, 1, 1)  # the lock of the dead is free


def modes_follow(path: Path, umask: int) -> None:
    """R15: files and folders of a run have the modes that the umask gives."""
    before = os.umask(umask)
    try:
        run = committed(path, 1)
    finally:
        os.umask(before)
    for there in (run.path, *run.path.rglob("*")):
        asked = (0o777 if there.is_dir() else 0o666) & ~umask
        assert there.stat().st_mode & 0o777 == asked, f"{there} has {there.stat().st_mode & 0o777:o}, {asked:o} asked"


def nothing_infinite_is_committed(path: Path) -> None:
    """R6: weights that are not finite never have a name."""
    run = committed(path, 1)

    def write(files: ManifestWriter) -> None:
        files.add_tensors("model.safetensors", {"a": torch.tensor([1.0, float("nan")])})

    with run.lock(), suppress(NonFiniteError):
        run.commit_step(2, write, {})
    assert run.step_numbers() == [1]
    assert manifest.verify_folder(run.step_path(1), "step", 1).step == 1
