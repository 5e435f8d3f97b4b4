"""Run directory: atomically committed training steps, the latest valid one, retention, and the writer's lock."""

import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from laconic.errors import BusyError, CorruptArtifactError, UnsafeFileError, UsageError, translate_os_errors
from laconic.storage import atomic, lock, manifest
from laconic.storage.manifest import Manifest, ManifestWriter, UnsupportedFormatError
from laconic.storage.temporary import create_temporary_folder

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED_NAMES = {"CON", "PRN", "AUX", "NUL"} | {f"{port}{n}" for port in ("COM", "LPT") for n in range(1, 10)}
STEP_PATTERN = re.compile(r"step-(\d{6,})")
MIN_RETAINED_STEPS = 2


def check_name(name: str) -> str:
    """Return the name of a run, memory, adapter or session if it is valid on every operating system."""
    stem = PureWindowsPath(name).name.partition(".")[0].upper()
    if not NAME_PATTERN.fullmatch(name) or name.endswith(".") or stem in RESERVED_NAMES:
        raise UsageError(
            f"{name[:80]!r} is not a valid name; start with a letter or digit, "
            "then use letters, digits, '.', '_' and '-', at most 64"
        )
    return name


class StepFolder(NamedTuple):
    """A committed step whose files match its manifest."""

    step: int
    path: Path
    manifest: Manifest

    def has_fingerprint(self, name: str, expected: str) -> bool:
        """Return whether the step was written for this recipe, data, tokenizer or base."""
        return self.manifest.fingerprints.get(name) == expected


class RunDirectory:
    """The directory of a training run.

    Committed steps never change, so reading needs no lock; write inside `with run.lock():`.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()
        check_name(self.path.name)
        self.steps_folder = self.path / "steps"
        self._is_locked = False

    @contextmanager
    def lock(self) -> Generator["RunDirectory"]:
        """Create the directory, hold its lock and remove what an interrupted writer left.

        Raises UnsafeFileError if a part of it is a link, through which other folders would be changed.
        """
        for part in (self.steps_folder, self.path / "metrics.jsonl"):
            atomic.check_not_link(part)
        is_new = not self.path.exists()
        with translate_os_errors(self.path):
            self.steps_folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.path, self.path.parent):
                atomic.fsync_path(folder)
        with lock.lock_folder(self.path):
            self._is_locked = True
            try:
                self.remove_leftovers()
                yield self
            except BaseException:
                if is_new and {path.name for path in self.path.rglob("*")} <= {"steps", "lock", "lock.json"}:
                    shutil.rmtree(self.path, ignore_errors=True)  # nothing was written: do not leave an empty run
                raise
            finally:
                self._is_locked = False

    def remove_leftovers(self) -> None:
        """Delete temporary folders and the partial last line of metrics.jsonl.

        The directory may be one that the user has other files in; `steps` is laconic's own.
        """
        temporary = self.path.glob(f".tmp-*-{'[0-9a-f]' * len(uuid.uuid4().hex)}")
        with translate_os_errors(self.path):
            for path in (*temporary, *self.steps_folder.glob(".tmp-*"), *self.steps_folder.glob(".trash-*")):
                atomic.remove_path(path)
            metrics = self.path / "metrics.jsonl"
            if metrics.exists():
                truncate_partial_line(metrics)

    def step_numbers(self) -> list[int]:
        """Return the numbers of all step folders in ascending order, without verifying them."""
        paths = self.steps_folder.iterdir() if self.steps_folder.is_dir() else ()
        return sorted(int(match[1]) for path in paths if (match := STEP_PATTERN.fullmatch(path.name)))

    def step_path(self, step: int) -> Path:
        return self.steps_folder / f"step-{step:06d}"

    def commit_step(
        self,
        step: int,
        write: Callable[[ManifestWriter], None],
        fingerprints: Mapping[str, str],
        expected_bytes: int = 0,
    ) -> Path:
        """Write a complete step or none.

        `write` adds every file to the writer that it is given; the manifest, with the `fingerprints`, comes last. If an
        equal step exists already, it is left as it is; a different one with this number is a BusyError.
        """
        self._require_lock("commit_step")
        final = self.step_path(step)
        with translate_os_errors(final, expected_bytes):
            atomic.check_free_space(self.steps_folder, expected_bytes)
            with create_temporary_folder(final) as temporary:
                writer = ManifestWriter(temporary)
                write(writer)
                new = writer.finish("step", step, fingerprints)
                if self._is_committed(final, new):
                    shutil.rmtree(temporary, ignore_errors=True)
                else:
                    os.rename(temporary, final)
            atomic.fsync_path(self.steps_folder)
        atomic.write_text_atomically(self.path / "latest", final.name + "\n")  # for people and scripts; never read
        return final

    def _is_committed(self, final: Path, new: Manifest) -> bool:
        """Return whether an equal step exists; raise `BusyError` for a different one."""
        if not final.exists():
            return False
        with suppress(CorruptArtifactError):
            if manifest.read_manifest(final).canonical_text == new.canonical_text:
                return True
        raise BusyError(f"{final} exists with other contents; resume from it or choose another folder")

    def latest_valid_step(self) -> StepFolder | None:
        """Return the newest step that passes verification, or None if the run has no steps.

        A corrupt or unsafe step is skipped with a warning; while the lock is held it is also renamed to `.bad-…`, so
        that its number can be written again.

        Raises CorruptArtifactError if there are steps but none is valid, or the newest has another format.
        """
        for step in reversed(self.step_numbers()):
            try:
                return self.get_step(step)
            except UnsupportedFormatError:
                raise
            except (CorruptArtifactError, UnsafeFileError) as error:
                warnings.warn(f"{error}; using the checkpoint before it")
                if self._is_locked:
                    self._rename_bad(self.step_path(step))
        if any(self.steps_folder.glob(".bad-step-*")) or self.step_numbers():
            raise CorruptArtifactError(f"{self.path}: no valid checkpoint; restore a copy or choose another folder")
        return None

    def get_step(self, step: int) -> StepFolder:
        folder = self.step_path(step)
        if not folder.is_dir():
            available = ", ".join(map(str, self.step_numbers())) or "none"
            raise UsageError(f"{self.path} has no checkpoint of step {step}; available: {available}")
        return StepFolder(step, folder, manifest.verify_folder(folder, "step", step))

    def discard_after(self, step: int) -> None:
        """Rename all later steps to `.bad-…`, with a warning, so that the run can continue from this one."""
        self._require_lock("discard_after")
        later = [n for n in self.step_numbers() if n > step]
        for n in later:
            self._rename_bad(self.step_path(n))
        if later:
            steps = ", ".join(map(str, later))
            warnings.warn(f"{self.path}: renamed the checkpoints of later steps {steps} to .bad-step-…")

    def _rename_bad(self, folder: Path) -> None:
        bad = folder.with_name(f".bad-{folder.name}")
        with translate_os_errors(folder):
            os.rename(folder, bad if not bad.exists() else bad.with_name(f"{bad.name}-{uuid.uuid4().hex}"))
            atomic.fsync_path(self.steps_folder)

    def prune_steps(self, keep: Collection[int]) -> None:
        """Delete all steps but `keep` and the newest two, after verifying the newest one."""
        self._require_lock("prune_steps")
        surplus = [step for step in self.step_numbers()[:-MIN_RETAINED_STEPS] if step not in keep]
        if not surplus:
            return
        try:
            self.get_step(self.step_numbers()[-1])
        except (CorruptArtifactError, UnsafeFileError) as error:
            warnings.warn(f"{error}; no checkpoint is deleted")
            return
        for step in surplus:
            trash = self.steps_folder / f".trash-{self.step_path(step).name}-{uuid.uuid4().hex}"
            with translate_os_errors(trash):
                os.rename(self.step_path(step), trash)
                shutil.rmtree(trash)

    def _require_lock(self, operation: str) -> None:
        if not self._is_locked:
            raise ValueError(f"{operation} requires the lock; call it inside `with run.lock():`")


def truncate_partial_line(path: Path) -> None:
    """Remove an incomplete last line, which an interrupted writer left."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
