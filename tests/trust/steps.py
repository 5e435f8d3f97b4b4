"""Checks of a run directory under failures; tests/trust/test_net.py repeats them with one safeguard removed."""

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


def write_step(n: int, width: int = 64) -> Callable[[ManifestWriter], None]:
    """Write a step whose tensors hold its number."""

    def write(writer: ManifestWriter) -> None:
        writer.add_tensors("model.safetensors", {"a": torch.full((width, width), float(n)), "b": torch.arange(n)})
        writer.add_tensors("optimizer.safetensors", {"a": torch.full((width,), float(n))})
        writer.add_json("progress.json", {"step": n})

    return write


def commit_steps(path: Path, *steps: int) -> RunDirectory:
    run = RunDirectory(path)
    with run.lock():
        for n in steps:
            run.commit_step(n, write_step(n), {"data": "d"})
            run.prune_steps(())
    return run


def check_intact(run: RunDirectory, least: int, most: int) -> None:
    """Check that the latest step is in [least, most], has its own tensors, and that no temporary file remains."""
    temporary = list(run.path.rglob(".tmp-*"))
    assert len(temporary) <= 1, f"{temporary}"
    with run.lock():
        latest = run.latest_valid_step()
        assert [p for p in run.path.rglob(".*") if p.name.startswith((".tmp-", ".trash-"))] == []
    assert latest is not None
    assert list(run.steps_folder.glob(".bad-*")) == [], "a partial step was committed"
    assert least <= latest.step <= most, f"step {latest.step} is the latest, {least} was committed"
    tensors = atomic.open_tensors(latest.path / "model.safetensors", ["a", "b"])
    assert bool((tensors["a"] == latest.step).all())
    assert len(tensors["b"]) == latest.step


def kill_at_a_random_time(path: Path, draw: int) -> None:
    """R1: kill a writer that commits step after step at a random time."""

    def write(tell: Callable[[int], None]) -> None:
        with run.lock():
            for n in range(2, 10_000):
                run.commit_step(n, write_step(n), {"data": "d"})
                run.prune_steps(())
                tell(n)

    run = commit_steps(path, 1)
    child = Child(write)
    chance = random.Random(draw)
    child.wait_for(2 + chance.randrange(3))
    time.sleep(chance.uniform(0, 0.02))
    child.signal(signal.SIGKILL)
    assert child.end() == 128 + signal.SIGKILL
    check_intact(run, child.last, child.last + 1)


# The first call of each of the seven parts of a commit.
COMMIT_PARTS: dict[str, tuple[Any, str]] = {
    "room": (atomic, "check_free_space"),
    "folder": (Path, "mkdir"),
    "finite": (atomic, "check_finite"),
    "files": (atomic, "save_file"),
    "manifest": (ManifestWriter, "finish"),
    "rename": (os, "rename"),
    "latest": (atomic, "write_text_atomically"),
}


def kill_before(path: Path, name: str) -> None:
    """R1: kill the process before one part of a commit."""
    owner, attribute = COMMIT_PARTS[name]

    def write(tell: Callable[[int], None]) -> None:
        with run.lock():
            setattr(owner, attribute, lambda *args, **named: die())
            run.commit_step(3, write_step(3), {"data": "d"})

    run = commit_steps(path, 1, 2)
    assert Child(write).end() == 128 + signal.SIGKILL
    step = 3 if name == "latest" else 2
    check_intact(run, step, step)


class Recorder:
    """Records every fsync and rename; `lose` simulates a power cut that keeps only what was synced."""

    def __init__(self) -> None:
        self.synced: dict[int, list[int]] = {}  # inode -> events at which it was synced
        self.renamed: list[tuple[int, Path, Path]] = []
        self.events: list[str] = []

    @contextmanager
    def recording(self) -> Iterator["Recorder"]:
        fsync, rename, replace = os.fsync, os.rename, os.replace

        def on_fsync(fd: int) -> None:
            fsync(fd)
            status = os.fstat(fd)
            self.synced.setdefault(status.st_ino, []).append(len(self.events))
            self.events.append("folder" if stat.S_ISDIR(status.st_mode) else "file")

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
        """Empty the files that were not synced, and undo renames in folders that were not synced afterwards."""
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


def check_power_cut(path: Path) -> None:
    """R1: a commit is on disk, in the order write, fsync, rename, fsync."""
    run = commit_steps(path, 1)
    recorder = Recorder()
    with run.lock(), recorder.recording():
        run.commit_step(2, write_step(2), {"data": "d"})
    rename = recorder.events.index("rename")
    assert recorder.events[:rename].count("file") == 4, "three files and the manifest before the rename"
    assert recorder.events[rename - 1] == "folder"
    assert recorder.events[rename + 1] == "folder"
    recorder.lose(run.step_path(2))
    recorder.lose(run.steps_folder)
    check_intact(run, 2, 2)


def list_files(run: RunDirectory, step: int) -> list[tuple[Path, int]]:
    """Every file of a step with its size, including the manifest."""
    return [(path, path.stat().st_size) for path in sorted(run.step_path(step).iterdir())]


def random_bytes(run: RunDirectory, step: int, n: int, seed: int) -> list[tuple[Path, int]]:
    """Return `n` positions in the files of a step, half of them in small files and headers."""
    chance = random.Random(seed)
    files = list_files(run, step)
    positions: list[tuple[Path, int]] = []
    for i in range(n):
        path, size = chance.choice(files)
        positions.append((path, chance.randrange(min(size, 400) if i % 2 else size)))
    return positions


def is_skipped(run: RunDirectory) -> bool:
    """Whether step 1 is returned in place of the corrupt step 2, with a warning of one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            latest = run.latest_valid_step()
        except manifest.UnsupportedFormatError:  # a flip changed the format, which is refused, not skipped
            return True
        except CorruptArtifactError:
            return False
    lines = [str(warning.message) for warning in caught]
    return latest is not None and latest.step == 1 and len(lines) == 1 and "\n" not in lines[0]


def check_truncations(path: Path, n: int) -> None:
    """R5: truncate a file of a step anywhere."""
    run = commit_steps(path, 1, 2)
    missed = []
    for file, at in random_bytes(run, 2, n, 5):
        content = file.read_bytes()
        file.write_bytes(content[:at])
        if not is_skipped(run):
            missed.append((file.name, at))
        file.write_bytes(content)
    assert missed == []
    assert not is_skipped(run)


def check_bit_flips(path: Path, n: int) -> None:
    """R5: flip any bit of a step."""
    run = commit_steps(path, 1, 2)
    missed = []
    for i, (file, at) in enumerate(random_bytes(run, 2, n, 6)):
        content = file.read_bytes()
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << i % 8]) + content[at + 1 :])
        if not is_skipped(run):
            missed.append((file.name, at))
        file.write_bytes(content)
    assert missed == []


def check_pruning_verifies(path: Path) -> None:
    """R5: corrupt new steps do not lead to the deletion of valid old ones."""
    run = RunDirectory(path)
    with run.lock(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (1, 2, 3):
            run.commit_step(n, write_step(n), {})
        for n in (2, 3):
            (run.step_path(n) / "model.safetensors").write_bytes(b"")
        run.prune_steps(())
        latest = run.latest_valid_step()
    assert latest is not None
    assert latest.step == 1


def check_single_writer(path: Path) -> None:
    """R13: of two writers one holds the lock and the other ends with 73 while it does."""

    def write(tell: Callable[[int], None]) -> None:
        with run.lock():
            tell(1)
            time.sleep(60)

    run = commit_steps(path, 1)
    first = Child(write)
    first.wait_for(1)
    second = Child(write)
    code = second.end()
    first.signal(signal.SIGKILL)
    first.end()
    assert code == BusyError.exit_code
    check_intact(run, 1, 1)  # the lock of a killed process is free


def check_modes(path: Path, umask: int) -> None:
    """R15: files and folders of a run follow the umask."""
    before = os.umask(umask)
    try:
        run = commit_steps(path, 1)
    finally:
        os.umask(before)
    for p in (run.path, *run.path.rglob("*")):
        expected = (0o777 if p.is_dir() else 0o666) & ~umask
        assert p.stat().st_mode & 0o777 == expected, f"{p} has {p.stat().st_mode & 0o777:o}, expected {expected:o}"


def check_nonfinite_is_refused(path: Path) -> None:
    """R6: weights with NaN are not committed."""
    run = commit_steps(path, 1)

    def write(writer: ManifestWriter) -> None:
        writer.add_tensors("model.safetensors", {"a": torch.tensor([1.0, float("nan")])})

    with run.lock(), suppress(NonFiniteError):
        run.commit_step(2, write, {})
    assert run.step_numbers() == [1]
    assert manifest.verify_folder(run.step_path(1), "step", 1).step == 1
