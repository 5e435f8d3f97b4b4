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

from laconic.core import artifact, lock, manifest
from laconic.core.errors import Busy, Damaged, Usage, on_disk
from laconic.core.manifest import Files, Manifest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = {"CON", "PRN", "AUX", "NUL"} | {f"{port}{n}" for port in ("COM", "LPT") for n in range(1, 10)}
STEP = re.compile(r"step-(\d{6,})")
LEAST = 2  # steps that are never deleted, the newest


def check_name(name: str) -> str:
    """The name of a run, memory, adapter or session, or `Usage` (2): letters, digits, . _ - and no more than 64."""
    stem = PureWindowsPath(name).name.partition(".")[0].upper()
    if not NAME.fullmatch(name) or name.endswith(".") or stem in RESERVED:
        raise Usage(f"{name[:80]!r} is no name: begin with a letter or digit, then letters, digits, . _ -, at most 64")
    return name


class Committed(NamedTuple):
    """A step all of whose files are as its manifest says."""

    number: int
    folder: Path
    manifest: Manifest


class RunFolder:
    """runs/NAME. Reading takes no lock, since committed steps do not change; write inside `with run.held():`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()
        check_name(self.path.name)
        self.steps = self.path / "steps"
        self._held = False

    @contextmanager
    def held(self) -> Generator["RunFolder"]:
        """Makes the folder, holds its lock and sweeps; raises `Busy` (73) where another process writes."""
        with on_disk(self.path):
            self.steps.mkdir(parents=True, exist_ok=True)
            for folder in (self.path, self.path.parent):
                artifact.sync(folder)
        with lock.held(self.path):
            self._held = True
            try:
                self.sweep()
                yield self
            finally:
                self._held = False

    def sweep(self) -> None:
        """Removes what a writer that was killed left: temporary folders, half a line of metrics.jsonl."""
        with on_disk(self.path):
            for folder in (self.path, self.steps):
                for path in (*folder.glob(".tmp-*"), *folder.glob(".trash-*")):
                    _remove(path)
            metrics = self.path / "metrics.jsonl"
            if metrics.exists():
                cut_half_line(metrics)

    def numbers(self) -> list[int]:
        """Steps that have a folder, oldest first; whether they are good is not asked."""
        there = self.steps.iterdir() if self.steps.is_dir() else ()
        return sorted(int(found[1]) for path in there if (found := STEP.fullmatch(path.name)))

    def step(self, number: int) -> Path:
        """Where a step lies or will lie."""
        return self.steps / f"step-{number:06d}"

    def commit(self, number: int, write: Callable[[Files], None], bound: Mapping[str, str], expected: int = 0) -> Path:
        """A whole step or none: `write` fills it file by file, the manifest comes last, then it takes its name.

        An equal step is left as it is; another one under the same number is `Busy` (73). `expected` is the number of
        bytes to come. Raises `NonFinite` (65) before anything has its name, `NoSpace` (74).
        """
        self._ask_held("commit")
        final = self.step(number)
        with on_disk(final, expected):
            artifact.ask_room(self.steps, expected)
            temporary = self.steps / f".tmp-{final.name}-{uuid.uuid4().hex}"
            try:
                temporary.mkdir()
                files = Files(temporary)
                write(files)
                made = files.seal("step", number, bound)
                if not self._there(final, made):
                    os.rename(temporary, final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            shutil.rmtree(temporary, ignore_errors=True)
            artifact.sync(self.steps)
        self._point(final)
        return final

    def _there(self, final: Path, made: Manifest) -> bool:
        """Whether an equal step has the name already."""
        if not final.exists():
            return False
        with suppress(Damaged):
            if manifest.read(final).text == made.text:
                return True
        raise Busy(f"{final} exists and holds something else; resume from it, or choose another folder")

    def _point(self, final: Path) -> None:
        """`latest`, a hint for people and scripts."""
        artifact.replace_file(self.path / "latest", lambda new: new.write_text(final.name + "\n", encoding="utf-8"))

    def newest(self) -> Committed | None:
        """The newest good step, None if there never was one. Raises `Damaged` (76) if none of those there is good.

        A bad one is passed over with a warning and, by a writer, renamed to .bad-…, so that its number is free.
        """
        for number in reversed(self.numbers()):
            try:
                return self.asked(number)
            except manifest.TooNew:
                raise
            except Damaged as error:
                warnings.warn(f"{error}; the step before it is taken")
                if self._held:
                    self._put_aside(self.step(number))
        if any(self.steps.glob(".bad-step-*")) or self.numbers():
            raise Damaged(f"{self.path}: no step is good; take a copy, or choose another folder")
        return None

    def asked(self, number: int) -> Committed:
        """One step by its number, never another. Raises `Damaged` (76), `Usage` (2) if there is none."""
        folder = self.step(number)
        if not folder.is_dir():
            there = ", ".join(map(str, self.numbers())) or "none"
            raise Usage(f"{self.path} has no step {number}; there: {there}")
        return Committed(number, folder, manifest.check(folder, "step", number))

    def forget_after(self, number: int) -> None:
        """Puts the later steps aside, with a warning, so that the run can go on from this one."""
        self._ask_held("forget_after")
        later = [n for n in self.numbers() if n > number]
        for n in later:
            self._put_aside(self.step(n))
        if later:
            warnings.warn(f"{self.path}: steps {', '.join(map(str, later))} are put aside, as .bad-step-…")

    def _put_aside(self, folder: Path) -> None:
        bad = folder.with_name(f".bad-{folder.name}")
        with on_disk(folder):
            os.rename(folder, bad if not bad.exists() else bad.with_name(f"{bad.name}-{uuid.uuid4().hex}"))
            artifact.sync(self.steps)

    def retain(self, keep: Collection[int]) -> None:
        """Deletes all steps but `keep` and the two newest, once the newest has been read back and found good."""
        self._ask_held("retain")
        spare = [number for number in self.numbers()[:-LEAST] if number not in keep]
        if not spare:
            return
        try:
            self.asked(self.numbers()[-1])
        except Damaged as error:
            warnings.warn(f"{error}; nothing is deleted")
            return
        for number in spare:
            trash = self.steps / f".trash-{self.step(number).name}-{uuid.uuid4().hex}"
            with on_disk(trash):
                os.rename(self.step(number), trash)
                shutil.rmtree(trash)

    def _ask_held(self, what: str) -> None:
        if not self._held:
            raise ValueError(f"{what}: the run is not held; write inside `with run.held():`")


def cut_half_line(path: Path) -> None:
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


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
