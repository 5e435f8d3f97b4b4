"""Run the same command twice at the same time in the same folder."""

import random
import shutil
import time
from pathlib import Path

from benchmarks.probes.counts import Counts
from benchmarks.probes.kills import Reference, describe, finish
from benchmarks.probes.processes import ForkedCommand
from benchmarks.probes.works import BUSY, Work


def race(work: Work, base: Path, num_trials: int, trial: int | None, command: str) -> Counts:
    """Let two writers race `num_trials` times, or in one trial.

    A second writer that is refused counts as damage found; two that both end well as harmless if the results are those
    of one, and as silent if they are not.
    """
    counts = Counts(work.name, command, detected=0, harmless=0, silent=0)
    reference = Reference(work, base / "reference")
    for number in range(num_trials) if trial is None else [trial]:
        rng = random.Random(f"{work.name} {number}")
        folder = base / f"race-{number}"
        writers = [ForkedCommand(work.begin or work.run, work.prepare_folder(folder))]
        time.sleep(rng.uniform(0, reference.ending.seconds / 2))
        writers.append(ForkedCommand(work.begin or work.run, folder, log=f"{folder.name}-second"))
        endings = [writer.wait() for writer in writers]
        is_refused = any(ending.code == BUSY for ending in endings)
        bad = [describe(ending) for ending in endings if ending.code not in (0, BUSY) or "Traceback" in ending.err]
        problem = "; ".join(bad) or finish(work, reference, folder)
        outcome = "silent" if problem and not bad else "harmless"
        if is_refused:
            outcome = "detected"
        counts.attempted += 1
        counts.survived += not problem
        if not bad:
            setattr(counts, outcome, getattr(counts, outcome) + 1)
        if problem:
            counts.fail(number, problem)
        shutil.rmtree(folder)
        counts.show_progress(num_trials)
    return counts
