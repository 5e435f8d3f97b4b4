"""Progress of `laconic demo` in percent of its time: that of the runs' steps, two runs at a time."""

import re
import time
from collections.abc import Collection, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.console import ProgressFn

if TYPE_CHECKING:
    from laconic.cli.commands.demo import DemoRun

EARLY_STOPS = {"short": 300, "chain": 450, "teacher": 100}  # steps after which these runs are accurate, with seed 0
QUICK_RUNS, QUICK_STEP = ("short", "nochain"), 0.4  # without a long chain, a step takes this share of another's time
STEP = re.compile(rb'"step":(\d+)')
TAIL_BYTES = 2048


class DemoProgress:
    """Shows what share of the demo's work is done, so that its pace so far, on any machine, gives the time left."""

    def __init__(self, runs: Sequence["DemoRun"], show: ProgressFn, num_workers: int) -> None:
        self.runs = runs
        self.show = show
        self.num_workers = num_workers
        self.bases = {run.name: run.base for run in runs}
        self.whole = schedule({run.name: count_work(run) for run in runs}, self.bases, num_workers)
        self.percent = 0
        self.last = -1.0

    def update(self, running: Sequence["DemoRun"], finished: Collection[str | None]) -> None:
        """Show the running runs and the percentage, at most once a second."""
        if time.monotonic() < self.last + 1:
            return
        self.last = time.monotonic()
        waiting = [run for run in self.runs if run.name not in finished]
        work = {run.name: count_work(run) * (1 - measure_share(run)) for run in waiting}
        left = schedule(work, self.bases, self.num_workers)
        self.percent = max(self.percent, int(100 * (1 - left / self.whole)))
        names = " and ".join(run.name for run in running)
        num_done = len(self.runs) - len(waiting)
        self.show(f"{names}, {num_done} of {len(self.runs)} runs done, percent", self.percent, 100)


def count_work(run: "DemoRun") -> float:
    """Return the work of a run, in steps of one with a chain."""
    return count_steps(run) * (QUICK_STEP if run.entry.name in QUICK_RUNS else 1.0)


def count_steps(run: "DemoRun") -> int:
    return min(run.recipe.train.steps or 1, EARLY_STOPS.get(run.entry.name, run.recipe.train.steps or 1))


def measure_share(run: "DemoRun") -> float:
    return min(1.0, read_last_step(run.path / "metrics.jsonl") / count_steps(run))


def read_last_step(file: Path) -> int:
    if not file.is_file():
        return 0
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        steps = STEP.findall(stream.read())
    return int(steps[-1]) if steps else 0


def schedule(work: Mapping[str, float], bases: Mapping[str, str | None], num_workers: int) -> float:
    """Return when the last run ends, each starting after its base on the first free worker; others have ended."""
    ends = dict.fromkeys([None, *(bases.keys() - work.keys())], 0.0)
    free = [0.0] * num_workers
    waiting = dict(work)
    while waiting:
        starts = {name: max(min(free), ends.get(bases[name], inf)) for name in waiting}
        name = min(starts, key=lambda name: starts[name])
        ends[name] = free[free.index(min(free))] = starts[name] + waiting.pop(name)
    return max(free)
