"""The safety net: each guard is taken away by patching, and the question that it answers must then come out wrong."""

import contextlib
import os
import stat
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from laconic.storage import atomic, lock, manifest
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory
from laconic.training import checkpoint
from laconic.training import run as training_run
from laconic.training.metrics import MetricsWriter
from laconic.training.step import Updater
from tests.trust import steps, test_resume
from tests.trust.nonfinite_cases import stops

Patch = pytest.MonkeyPatch


class Guard(NamedTuple):
    """A way to take a guard away, and the question that must then turn red."""

    remove: Callable[[Patch], None]
    question: Callable[[Path], object]


def unsynced(what: Callable[[int], bool]) -> Callable[[Patch], None]:
    """Syncs everything but files, or but folders."""
    sync = atomic.fsync_path
    return lambda patch: patch.setattr(
        atomic, "fsync_path", lambda path: None if what(path.stat().st_mode) else sync(path)
    )


def in_place(
    self: RunDirectory, number: int, write: Callable[[ManifestWriter], None], bound: Any, expected: int = 0
) -> Path:
    """A commit that writes where the step will lie."""
    files = ManifestWriter(self.step_path(number))
    files.folder.mkdir()
    write(files)
    files.finish("step", number, bound)
    return files.folder


def manifest_after(
    self: RunDirectory, number: int, write: Callable[[ManifestWriter], None], bound: Any, expected: int = 0
) -> Path:
    """A commit that gives the step its name before its manifest."""
    files = ManifestWriter(self.steps_folder / f".tmp-{uuid.uuid4().hex}")
    files.folder.mkdir()
    write(files)
    os.rename(files.folder, self.step_path(number))
    files.folder = self.step_path(number)
    files.finish("step", number, bound)
    return files.folder


def sizes_alone(folder: Path, name: str, promised: manifest.FileEntry) -> None:
    if (folder / name).stat().st_size != promised.bytes:
        raise manifest.CorruptArtifactError(f"{name} has another size")


def unread(self: RunDirectory, keep: Any) -> None:
    """Retention that believes the newest step."""
    for number in self.step_numbers()[:-2]:
        os.rename(self.step_path(number), self.steps_folder / f".trash-{number}")


def uncut(patch: Patch) -> None:
    start = MetricsWriter.__init__

    def made(self: MetricsWriter, path: Path, start_: int = 0, track: str | None = None) -> None:
        start(self, path, path.stat().st_size if path.exists() else 0, track)

    patch.setattr(training_run, "Metrics", type("Uncut", (MetricsWriter,), {"__init__": made}))


GUARDS: dict[str, Guard] = {
    "file fsync": Guard(unsynced(stat.S_ISREG), steps.survives_a_power_cut),
    "directory fsync": Guard(unsynced(stat.S_ISDIR), steps.survives_a_power_cut),
    "rename": Guard(
        lambda patch: patch.setattr(RunDirectory, "commit_step", in_place),
        lambda path: steps.killed_before(path, "files"),
    ),
    "manifest last": Guard(
        lambda patch: patch.setattr(RunDirectory, "commit_step", manifest_after),
        lambda path: steps.killed_before(path, "manifest"),
    ),
    "sweep": Guard(
        lambda patch: patch.setattr(RunDirectory, "remove_leftovers", lambda self: None),
        lambda path: steps.killed_before(path, "files"),
    ),
    "checksum": Guard(
        lambda patch: patch.setattr(manifest, "_check_file", sizes_alone),
        lambda path: steps.every_flip_is_found(path, 20),
    ),
    "digest of the manifest": Guard(
        lambda patch: patch.setattr(manifest, "hash_json", lambda value: "0"),
        lambda path: steps.every_flip_is_found(path, 100),
    ),
    "lock": Guard(
        lambda patch: patch.setattr(lock, "lock_folder", lambda folder: contextlib.nullcontext()), steps.one_writer
    ),
    "chmod by umask": Guard(
        lambda patch: patch.setattr(Path, "chmod", lambda self, mode: None),
        lambda path: steps.modes_follow(path, 0o027),
    ),
    "verify before retention": Guard(
        lambda patch: patch.setattr(RunDirectory, "prune_steps", unread), steps.deleting_waits_for_a_good_step
    ),
    "finite check before update": Guard(
        lambda patch: patch.setattr(Updater, "classify", lambda self, numbers: "applied"),
        lambda path: stops(path, "input"),
    ),
    "finite scan at commit": Guard(
        lambda patch: patch.setattr(atomic, "check_finite", lambda name, tensor: None),
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
