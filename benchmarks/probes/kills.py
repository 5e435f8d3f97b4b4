"""Kill commands with SIGKILL, repeat them, and compare the end with that of a command that was never killed."""

import random
import shutil
from pathlib import Path

from benchmarks.probes.counts import Counts
from benchmarks.probes.processes import KILLED, Ending, choose_moment, run_forked, run_until
from benchmarks.probes.works import BUSY, Work, check, find_leftovers
from laconic.errors import LaconicError

KILLS_PER_DRAW = 5  # the same command is killed so often before it may end
MAX_TEMPORARY = 1  # files or folders that one kill may leave until the next start


class Reference:
    """An uninterrupted command: its results, its time, and the number of its writes."""

    def __init__(self, work: Work, folder: Path) -> None:
        self.ending = check(run_forked(work.run, work.prepare_folder(folder)))
        self.snapshot = work.take_snapshot(folder)
        assert self.snapshot, f"{work.name} writes nothing"
        self.num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def kill_repeatedly(work: Work, reference: Reference, folder: Path, trial: int, counts: Counts) -> None:
    """Kill a command several times, each time resuming it, and compare its end with the reference."""
    chance = random.Random(f"{work.name} {trial}")
    work.prepare_folder(folder)
    remaining, progress, num_kills = reference.ending.num_writes, 0, 0
    for _ in range(KILLS_PER_DRAW):
        moment = choose_moment(chance, remaining, reference.ending.seconds)
        ending, commits = run_until(work.run, folder, moment)
        if ending.code != KILLED:
            if ending.code not in (0, BUSY):
                counts.survived -= min(1, num_kills)
                counts.fail(trial, f"after {num_kills} kills: {describe(ending)}")
                return
            break
        num_kills += 1
        counts.attempted += 1
        remaining = max(10, remaining - ending.num_writes)
        try:
            now = work.measure_progress(folder)
        except LaconicError as error:
            counts.fail(trial, f"kill {num_kills} left a partial step: {error}")
            return
        if now < max([progress, *commits]):
            counts.lost = (counts.lost or 0) + 1
            counts.fail(trial, f"kill {num_kills}: progress {now}, committed were {max([progress, *commits])}")
            return
        if len(left := find_leftovers(folder)) > MAX_TEMPORARY * num_kills:
            counts.fail(trial, f"kill {num_kills} left {left}")
            return
        progress = now
        counts.survived += 1
    if problem := finish(work, reference, folder):
        counts.survived -= min(1, num_kills)
        counts.fail(trial, f"after {num_kills} kills: {problem}")
    else:
        shutil.rmtree(folder)


def finish(work: Work, reference: Reference, folder: Path) -> str:
    """Run a command to its end and return how it differs from the reference, "" if it does not."""
    ending = run_forked(work.run, folder)
    if ending.code not in (0, BUSY):
        return describe(ending)
    snapshot = work.take_snapshot(folder)
    if snapshot != reference.snapshot:
        names = {
            name for name in {*snapshot, *reference.snapshot} if snapshot.get(name) != reference.snapshot.get(name)
        }
        return f"differs from the uninterrupted command in {', '.join(sorted(names))}"
    left = find_leftovers(folder)
    return f"left {left}" if left else ""


def describe(ending: Ending) -> str:
    """Return exit code and last line of a command."""
    return f"exit code {ending.code}: {(ending.err.strip() or ending.out.strip())[-300:]}"


def storm(work: Work, base: Path, num_kills: int, trial: int | None, command: str) -> Counts:
    """Kill a command about `num_kills` times, or repeat one trial."""
    counts, reference = Counts(work.name, command, lost=0), Reference(work, base / "reference")
    number = 0 if trial is None else trial
    while True:
        kill_repeatedly(work, reference, base / f"trial-{number}", number, counts)
        counts.show_progress(num_kills)
        number += 1
        if trial is not None or counts.attempted >= num_kills:
            return counts
