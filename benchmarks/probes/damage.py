"""Flip bits of files, cut them, and exchange them with others; then read them and judge what the reader did."""

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.probes.counts import Counts
from benchmarks.probes.kills import describe
from benchmarks.probes.processes import COMMIT, Action, Ending, run_forked
from benchmarks.probes.works import check

Outcome = Literal["detected", "harmless", "silent", "broken"]
REFUSALS = (2, 65, 66, 71, 73, 74, 76, 77)  # exit codes with which a reader may refuse a file
HEADER_BYTES = 400  # half of the flips of a file hit its first bytes
NUMBERS = re.compile(r"[0-9a-f]{16,}|[\d.,]+")


@dataclass(frozen=True)
class Artifact:
    """Files that a command wrote, and the command that reads them.

    Attributes:
        name: Its row in the tables.
        source: Folder with the files, which is copied for every trial.
        victims: Patterns of the files that are damaged.
        read: The command, run in the copy by a child process.
        get_result: Returns what the command computed from the files.
        other: A folder of equal layout with the files of another model or text, to exchange files with.
        refusals: Exit codes of a reader that refuses the file; a reader with other codes than ours is a peer, which may
            print a traceback.
    """

    name: str
    source: Path
    victims: tuple[str, ...]
    read: Action
    get_result: Callable[[Path, Ending], Any] = lambda folder, ending: ending.out
    other: Path | None = None
    refusals: tuple[int, ...] = REFUSALS

    def list_victims(self, folder: Path) -> list[Path]:
        """Return the files in a copy that may be damaged."""
        return sorted(path for pattern in self.victims for path in folder.glob(pattern) if path.is_file())


def damage_file(artifact: Artifact, folder: Path, rng: random.Random) -> tuple[Path, str]:
    """Damage one file of a copy; return the file and a description of the damage."""
    path = rng.choice([path for path in artifact.list_victims(folder) if path.stat().st_size])
    data, draw = bytearray(path.read_bytes()), rng.random()
    name = path.relative_to(folder)
    other = None if artifact.other is None else artifact.other / name
    if other is not None and other.is_file() and draw < 0.15:
        path.write_bytes(other.read_bytes())
        return path, f"{name} of another"
    if draw < 0.4:
        end = rng.randrange(len(data))
        path.write_bytes(data[:end])
        return path, f"{name} cut at {end}"
    position = rng.randrange(min(len(data), HEADER_BYTES) if rng.random() < 0.5 else len(data))
    bit = rng.randrange(8)
    data[position] ^= 1 << bit
    path.write_bytes(data)
    return path, f"{name}, byte {position}, bit {bit}"


def judge(
    reference: Ending, expected: Any, ending: Ending, result: Any, path: Path, refusals: tuple[int, ...]
) -> Outcome:
    """Return what a reader did with a damaged file.

    A refusal is one line and a documented exit code; a warning that names the file or its step counts as detected too,
    whatever the reader then returns.
    """
    if ending.code:
        is_peer = refusals != REFUSALS
        is_orderly = is_peer or "Traceback" not in ending.err
        return "detected" if ending.code in refusals and is_orderly else "broken"
    usual_lines = {NUMBERS.sub("#", line) for line in reference.err.splitlines()}
    new_lines = [line for line in ending.err.splitlines() if NUMBERS.sub("#", line) not in usual_lines]
    names = [path.name]
    if COMMIT.fullmatch(path.parent.name):
        names.append(path.parent.name)
    if any(name in line for name in names for line in new_lines):
        return "detected"
    return "harmless" if result == expected else "silent"


def read_copy(artifact: Artifact, folder: Path) -> tuple[Ending, Any]:
    """Run the reader on a copy; return how it ended and what it computed, None if it failed."""
    ending = run_forked(artifact.read, folder)
    try:
        return ending, None if ending.code else artifact.get_result(folder, ending)
    except ValueError as error:
        return ending, f"not readable: {error}"


def copy_artifact(artifact: Artifact, folder: Path) -> Path:
    """Copy the files of an artifact."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(artifact.source, folder)
    return folder


def spoil_repeatedly(artifact: Artifact, base: Path, num_trials: int, trial: int | None, command: str) -> Counts:
    """Damage an artifact in `num_trials` ways, or in the way of one trial."""
    counts = Counts(artifact.name, command, detected=0, harmless=0, silent=0)
    folder = base / "trial"
    reference, expected = read_copy(artifact, copy_artifact(artifact, folder))
    check(reference)
    for number in range(num_trials) if trial is None else [trial]:
        rng = random.Random(f"{artifact.name} {number}")
        path, damage = damage_file(artifact, copy_artifact(artifact, folder), rng)
        ending, result = read_copy(artifact, folder)
        outcome = judge(reference, expected, ending, result, path, artifact.refusals)
        counts.attempted += 1
        counts.survived += outcome in ("detected", "harmless")
        if outcome == "broken":
            counts.fail(number, f"{damage}: {describe(ending)}")
        else:
            setattr(counts, outcome, getattr(counts, outcome) + 1)
            if outcome == "silent":
                counts.fail(number, f"{damage}: not reported, and the result differs")
        counts.show_progress(num_trials)
    return counts
