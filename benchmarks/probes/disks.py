"""Run commands on full disks: a small tmpfs, and a limit on the size of files; then repeat them with room."""

import os
import random
import resource
import shutil
import subprocess
from pathlib import Path

from benchmarks.probes.counts import Counts
from benchmarks.probes.kills import Reference, describe, finish
from benchmarks.probes.processes import Ending, run_forked
from benchmarks.probes.works import Work

FULL = 74  # exit code
PAGE = 4096
LARGE = 64 * 2**20  # bytes of a disk with enough space
MIN_FILE_BYTES = 2048  # the messages of a command go to a file, too


def can_mount() -> bool:
    """Return whether this process may mount a tmpfs."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


class SmallDisk:
    """A tmpfs of a given size, mounted on a folder; the size is rounded up to pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={LARGE}", "tmpfs", folder], check=True)

    def resize(self, num_bytes: int) -> None:
        """Change the size."""
        subprocess.run(["mount", "-o", f"remount,size={num_bytes}", self.folder], check=True)

    def used_bytes(self) -> int:
        """Return the bytes in use."""
        status = os.statvfs(self.folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def unmount(self) -> None:
        """Remove the disk and all files on it."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)


def limit_file_size(num_bytes: int) -> None:
    """Let writes beyond a size fail."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def run_on_full_disk(work: Work, reference: Reference, folder: Path, trial: int) -> str:
    """Run a command with too little space and then with enough; return what went wrong, "" if nothing."""
    chance = random.Random(f"{work.name} {trial}")
    if trial % 2 or not can_mount():
        largest = max(path.stat().st_size for path in (folder.parent / "reference").rglob("*") if path.is_file())
        limit = chance.randrange(MIN_FILE_BYTES, max(MIN_FILE_BYTES + 1, largest))
        ending = run_forked(work.run, work.prepare_folder(folder), lambda: limit_file_size(limit))
        problem = is_wrong(work, ending) and f"files of {limit:,} bytes: {describe(ending)}"
        return problem or finish(work, reference, folder)
    disk = SmallDisk(folder)
    try:
        work.setup(folder)
        before = disk.used_bytes()
        size = before + PAGE * chance.randrange(1, max(2, (2 * reference.num_bytes) // PAGE))
        disk.resize(size)
        ending = run_forked(work.run, folder)
        disk.resize(LARGE)
        problem = is_wrong(work, ending) and f"disk of {size:,} bytes: {describe(ending)}"
        return problem or finish(work, reference, folder)
    finally:
        disk.unmount()


def is_wrong(work: Work, ending: Ending) -> bool:
    """Return whether a command neither succeeded nor failed in one line about the disk."""
    return ending.code not in (0, FULL, *work.exit_codes) or ("Traceback" in ending.err and not work.exit_codes)


def fill_disks(work: Work, base: Path, num_trials: int, trial: int | None, command: str) -> Counts:
    """Run a command on `num_trials` disks that are too small, or on that of one trial."""
    counts, reference = Counts(work.name, command), Reference(work, base / "reference")
    for number in range(num_trials) if trial is None else [trial]:
        problem = run_on_full_disk(work, reference, base / f"disk-{number}", number)
        counts.attempted += 1
        counts.survived += not problem
        if problem:
            counts.fail(number, problem)
        shutil.rmtree(base / f"disk-{number}", ignore_errors=True)
        counts.show_progress(num_trials)
    return counts
