"""A run's directory: steps that are whole or absent, the newest good one, what is kept, and who may write."""

import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from laconic.errors import BusyError, CorruptArtifactError, UsageError, translate_os_errors
from laconic.storage import atomic, lock, manifest
from laconic.storage.manifest import Manifest, ManifestWriter

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED_NAMES = {"CON", "PRN", "AUX", "NUL"} | {f"{port}{n}" for port in ("COM", "LPT") for n in range(1, 10)}
STEP_PATTERN = re.compile(r"step-(\d{6,})")
MIN_RETAINED_STEPS = 2  # steps that are never deleted, the newest


def check_name(name: str) -> str:
    """The name of a run, memory, adapter or session, or `Usage` (2): letters, digits, . _ - and no more than 64."""
    stem = PureWindowsPath(name).name.partition(".")[0].upper()
    if not NAME_PATTERN.fullmatch(name) or name.endswith(".") or stem in RESERVED_NAMES:
        raise UsageError(
            f"{name[:80]!r} is no name: begin with a letter or digit, then letters, digits, . _ -, at most 64"
        )
    return name


class StepFolder(NamedTuple):
    """A step all of whose files are as its manifest says."""

    step: int
    path: Path
    manifest: Manifest


class RunDirectory:
    """runs/NAME. Reading takes no lock, since committed steps do not change; write inside `with run.held():`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()
        check_name(self.path.name)
        self.steps_folder = self.path / "steps"
        self._is_locked = False

    @contextmanager
    def lock(self) -> Generator["RunDirectory"]:
        """Makes the folder, holds its lock and sweeps; raises `Busy` (73) where another process writes."""
        with translate_os_errors(self.path):
            self.steps_folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.path, self.path.parent):
                atomic.fsync_path(folder)
        with lock.lock_folder(self.path):
            self._is_locked = True
            try:
                self.remove_leftovers()
                yield self
            finally:
                self._is_locked = False

    def remove_leftovers(self) -> None:
        """Removes what a writer that was killed left: temporary folders, half a line of metrics.jsonl."""
        with translate_os_errors(self.path):
            for folder in (self.path, self.steps_folder):
                for path in (*folder.glob(".tmp-*"), *folder.glob(".trash-*")):
                    _remove_path(path)
            metrics = self.path / "metrics.jsonl"
            if metrics.exists():
                truncate_partial_line(metrics)

    def step_numbers(self) -> list[int]:
        """Steps that have a folder, oldest first; whether they are good is not asked."""
        there = self.steps_folder.iterdir() if self.steps_folder.is_dir() else ()
        return sorted(int(found[1]) for path in there if (found := STEP_PATTERN.fullmatch(path.name)))

    def step_path(self, step: int) -> Path:
        """Where a step lies or will lie."""
        return self.steps_folder / f"step-{step:06d}"

    def commit_step(
        self,
        step: int,
        write: Callable[[ManifestWriter], None],
        fingerprints: Mapping[str, str],
        expected_bytes: int = 0,
    ) -> Path:
        """A whole step or none: `write` fills it file by file, the manifest comes last, then it takes its name.

        An equal step is left as it is; another one under the same number is `Busy` (73). `expected` is the number of
        bytes to come. Raises `NonFinite` (65) before anything has its name, `NoSpace` (74).
        """
        self._require_lock("commit")
        final = self.step_path(step)
        with translate_os_errors(final, expected_bytes):
            atomic.check_free_space(self.steps_folder, expected_bytes)
            temporary = self.steps_folder / f".tmp-{final.name}-{uuid.uuid4().hex}"
            try:
                temporary.mkdir()
                files = ManifestWriter(temporary)
                write(files)
                made = files.finish("step", step, fingerprints)
                if not self._is_committed(final, made):
                    os.rename(temporary, final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            shutil.rmtree(temporary, ignore_errors=True)
            atomic.fsync_path(self.steps_folder)
        self._write_latest(final)
        return final

    def _is_committed(self, final: Path, made: Manifest) -> bool:
        """Whether an equal step has the name already."""
        if not final.exists():
            return False
        with suppress(CorruptArtifactError):
            if manifest.read_manifest(final).canonical_text == made.canonical_text:
                return True
        raise BusyError(f"{final} exists and holds something else; resume from it, or choose another folder")

    def _write_latest(self, final: Path) -> None:
        """`latest`, a hint for people and scripts."""
        atomic.write_file_atomically(
            self.path / "latest", lambda new: new.write_text(final.name + "\n", encoding="utf-8")
        )

    def latest_valid_step(self) -> StepFolder | None:
        """The newest good step, None if there never was one. Raises `Damaged` (76) if none of those there is good.

        A bad one is passed over with a warning and, by a writer, renamed to .bad-…, so that its number is free.
        """
        for number in reversed(self.step_numbers()):
            try:
                return self.get_step(number)
            except manifest.NewerFormatError:
                raise
            except CorruptArtifactError as error:
                warnings.warn(f"{error}; the step before it is taken")
                if self._is_locked:
                    self._rename_bad(self.step_path(number))
        if any(self.steps_folder.glob(".bad-step-*")) or self.step_numbers():
            raise CorruptArtifactError(f"{self.path}: no step is good; take a copy, or choose another folder")
        return None

    def get_step(self, step: int) -> StepFolder:
        """One step by its number, never another. Raises `Damaged` (76), `Usage` (2) if there is none."""
        folder = self.step_path(step)
        if not folder.is_dir():
            there = ", ".join(map(str, self.step_numbers())) or "none"
            raise UsageError(f"{self.path} has no step {step}; there: {there}")
        return StepFolder(step, folder, manifest.verify_folder(folder, "step", step))

    def discard_after(self, step: int) -> None:
        """Puts the later steps aside, with a warning, so that the run can go on from this one."""
        self._require_lock("forget_after")
        later = [n for n in self.step_numbers() if n > step]
        for n in later:
            self._rename_bad(self.step_path(n))
        if later:
            warnings.warn(f"{self.path}: steps {', '.join(map(str, later))} are put aside, as .bad-step-…")

    def _rename_bad(self, folder: Path) -> None:
        bad = folder.with_name(f".bad-{folder.name}")
        with translate_os_errors(folder):
            os.rename(folder, bad if not bad.exists() else bad.with_name(f"{bad.name}-{uuid.uuid4().hex}"))
            atomic.fsync_path(self.steps_folder)

    def prune_steps(self, keep: Collection[int]) -> None:
        """Deletes all steps but `keep` and the two newest, once the newest has been read back and found good."""
        self._require_lock("retain")
        spare = [number for number in self.step_numbers()[:-MIN_RETAINED_STEPS] if number not in keep]
        if not spare:
            return
        try:
            self.get_step(self.step_numbers()[-1])
        except CorruptArtifactError as error:
            warnings.warn(f"{error}; nothing is deleted")
            return
        for number in spare:
            trash = self.steps_folder / f".trash-{self.step_path(number).name}-{uuid.uuid4().hex}"
            with translate_os_errors(trash):
                os.rename(self.step_path(number), trash)
                shutil.rmtree(trash)

    def _require_lock(self, operation: str) -> None:
        if not self._is_locked:
            raise ValueError(f"{operation}: the run is not held; write inside `with run.held():`")


def truncate_partial_line(path: Path) -> None:
    """Cuts what follows the last line end of a file: a line whose writer was killed."""
    with path.open("rb+") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
