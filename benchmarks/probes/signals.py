"""Send signals to commands, once or twice, then repeat the commands."""

import random
import shutil
import signal
import time
from pathlib import Path

from benchmarks.probes.counts import Counts
from benchmarks.probes.kills import Reference, describe, finish
from benchmarks.probes.processes import INTERRUPTED, ForkedCommand
from benchmarks.probes.works import Work

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PREEMPTED = 75


def interrupt_once(work: Work, reference: Reference, folder: Path, trial: int) -> tuple[str, bool]:
    """Send a signal at any time, in one trial of three twice; return what went wrong, and whether work was lost."""
    chance = random.Random(f"{work.name} {trial}")
    number, is_twice = SIGNALS[trial % len(SIGNALS)], chance.random() < 1 / 3
    command = ForkedCommand(work.run, work.prepare_folder(folder))
    command.wait_for_write(chance.randrange(max(1, reference.ending.num_writes)))
    time.sleep(chance.uniform(0, 0.01))
    for _ in range(1 + is_twice):
        command.send_signal(number)
        time.sleep(chance.uniform(0, 0.01))
    ending = command.wait()
    name = f"{number.name}{' twice' * is_twice}"
    is_known = ending.code in (0, PREEMPTED, INTERRUPTED, 128 + number, *work.exit_codes)
    if not is_known or ("Traceback" in ending.err and not work.exit_codes):
        return f"{name}: {describe(ending)}", False
    progress = work.measure_progress(folder)
    if progress < max([0, *command.commits]):
        return f"{name}: progress {progress}, committed were {max(command.commits)}", True
    problem = finish(work, reference, folder)
    return problem and f"after {name} and {describe(ending)}: {problem}", False


def interrupt_repeatedly(work: Work, base: Path, num_trials: int, trial: int | None, command: str) -> Counts:
    """Interrupt a command `num_trials` times by signals, or as in one trial."""
    counts, reference = Counts(work.name, command, lost=0), Reference(work, base / "reference")
    for number in range(num_trials) if trial is None else [trial]:
        problem, is_lost = interrupt_once(work, reference, base / f"signal-{number}", number)
        counts.attempted += 1
        counts.survived += not problem
        counts.lost = (counts.lost or 0) + is_lost
        if problem:
            counts.fail(number, problem)
        shutil.rmtree(base / f"signal-{number}", ignore_errors=True)
        counts.show_progress(num_trials)
    return counts
