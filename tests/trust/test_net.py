"""The safety net: each guard is taken away by patching, and the question that it answers must then come out wrong."""

import contextlib
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from laconic.core import artifact, lock, manifest
from laconic.core.manifest import Files
from laconic.core.runs import RunFolder
from laconic.training import checkpoint, running
from laconic.training.log import Metrics
from laconic.training.step import Updating
from tests.trust import steps, test_resume
from tests.trust.spoiling import stops

Patch = pytest.MonkeyPatch


class Guard(NamedTuple):
    """A way to take a guard away, and the question that must then turn red."""

    remove: Callable[[Patch], None]
    question: Callable[[Path], object]


def unsynced(what: Callable[[int], bool]) -> Callable[[Patch], None]:
    """Syncs everything but files, or but folders."""
    sync = artifact.sync
    return lambda patch: patch.setattr(artifact, "sync", lambda path: None if what(path.stat().st_mode) else sync(path))


def in_place(self: RunFolder, number: int, write: Callable[[Files], None], bound: Any, expected: int = 0) -> Path:
    """A commit that writes where the step will lie."""
    files = Files(self.step(number))
    files.folder.mkdir()
    write(files)
    files.seal("step", number, bound)
    return files.folder


def manifest_after(self: RunFolder, number: int, write: Callable[[Files], None], bound: Any, expected: int = 0) -> Path:
    """A commit that gives the step its name before its manifest."""
    files = Files(self.steps / f".tmp-{uuid.uuid4().hex}")
    files.folder.mkdir()
    write(files)
    os.rename(files.folder, self.step(number))
    files.folder = self.step(number)
    files.seal("step", number, bound)
    return files.folder


def sizes_alone(folder: Path, name: str, promised: manifest.File) -> None:
    if (folder / name).stat().st_size != promised.bytes:
        raise manifest.Damaged(f"{name} has another size")


def unread(self: RunFolder, keep: Any) -> None:
    """Retention that believes the newest step."""
    for number in self.numbers()[:-2]:
        os.rename(self.step(number), self.steps / f".trash-{number}")


def uncut(patch: Patch) -> None:
    start = Metrics.__init__

    def made(self: Metrics, path: Path, start_: int = 0, track: str | None = None) -> None:
        start(self, path, path.stat().st_size if path.exists() else 0, track)

    patch.setattr(running, "Metrics", type("Uncut", (Metrics,), {"__init__": made}))


GUARDS: dict[str, Guard] = {
    "file fsync": Guard(unsynced(stat.S_ISREG), steps.survives_a_power_cut),
    "directory fsync": Guard(unsynced(stat.S_ISDIR), steps.survives_a_power_cut),
    "rename": Guard(
        lambda patch: patch.setattr(RunFolder, "commit", in_place), lambda path: steps.killed_before(path, "files")
    ),
    "manifest last": Guard(
        lambda patch: patch.setattr(RunFolder, "commit", manifest_after),
        lambda path: steps.killed_before(path, "manifest"),
    ),
    "sweep": Guard(
        lambda patch: patch.setattr(RunFolder, "sweep", lambda self: None),
        lambda path: steps.killed_before(path, "files"),
    ),
    "checksum": Guard(
        lambda patch: patch.setattr(manifest, "_check_file", sizes_alone),
        lambda path: steps.every_flip_is_found(path, 20),
    ),
    "digest of the manifest": Guard(
        lambda patch: patch.setattr(manifest, "fingerprint", lambda value: "0"),
        lambda path: steps.every_flip_is_found(path, 100),
    ),
    "lock": Guard(lambda patch: patch.setattr(lock, "held", lambda folder: contextlib.nullcontext()), steps.one_writer),
    "chmod by umask": Guard(
        lambda patch: patch.setattr(Path, "chmod", lambda self, mode: None),
        lambda path: steps.modes_follow(path, 0o027),
    ),
    "verify before retention": Guard(
        lambda patch: patch.setattr(RunFolder, "retain", unread), steps.deleting_waits_for_a_good_step
    ),
    "finite check before update": Guard(
        lambda patch: patch.setattr(Updating, "judged", lambda self, numbers: "applied"),
        lambda path: stops(path, "input"),
    ),
    "finite scan at commit": Guard(
        lambda patch: patch.setattr(artifact, "check_finite", lambda name, tensor: None),
        steps.nothing_infinite_is_committed,
    ),
    "cut of metrics.jsonl": Guard(uncut, test_resume.metrics_are_cut),
    "RNG restore": Guard(
        lambda patch: patch.setattr(checkpoint, "set_random_state", lambda state: None),
        test_resume.random_streams_are_restored,
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the step before it is taken")
@pytest.mark.parametrize("name", GUARDS)
def test_without_its_guard_the_question_turns_red(tmp_path: Path, monkeypatch: Patch, name: str) -> None:
    guard = GUARDS[name]
    guard.question(tmp_path / "with")
    guard.remove(monkeypatch)
    try:
        guard.question(tmp_path / "without")
    except (Exception, pytest.fail.Exception):
        return
    raise AssertionError(f"{name} is taken away and nothing notices")
