"""Child processes side by side: each when what it starts from is done, with the time left for all of them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import LaconicError

POLL = 0.2  # seconds between looks
PATIENCE = 10.0  # seconds a child has to commit a step after SIGTERM
UNFORESEEN = 70  # the exit code of an error that nobody expected, which Python ends with 1
STARTING = 0.1  # share of a job that is neither seen in `progress` nor over


class Failed(LaconicError):
    """A child process that ended with an error; its exit code is handed on."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


@dataclass(frozen=True)
class Job:
    """A command, what must be done before it, its cost in seconds of one idle core, and how far it is (0 to 1).

    `check` is asked when it is done; what it answers is why nothing can start from it.
    """

    name: str
    command: Sequence[str]
    log: Path
    cost: float
    after: tuple[str, ...] = ()
    progress: Callable[[], float] = lambda: 0.0
    done: Callable[[], bool] = lambda: False
    check: Callable[[], str | None] = lambda: None


@dataclass
class Child:
    """A job under way."""

    job: Job
    process: subprocess.Popen[bytes]
    began: float

    @property
    def share(self) -> float:
        """How much of it is done, as far as can be seen."""
        return min(1.0, STARTING / 2 + (1 - STARTING) * self.job.progress())


@dataclass(frozen=True)
class State:
    """What is shown: jobs done of all, those running with their shares, seconds left for the whole."""

    done: int
    all: int
    running: Mapping[str, float]
    left: float


class Jobs:
    """All jobs of a command, at most `width` at a time; leave the `with` block and none is left running."""

    def __init__(self, jobs: Sequence[Job], width: int = 2) -> None:
        self.all, self.width = {job.name: job for job in jobs}, width
        self.done: set[str] = set()
        self.refused: dict[str, str] = {}
        self.running: dict[str, Child] = {}
        self.spent = self.worked = 0.0  # seconds that ended jobs took, and what they were said to cost

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def go(self, show: Callable[[State], None] = lambda state: None) -> None:
        """Runs them to the end. Raises `Failed` with the log's path if one fails; the others are stopped then."""
        while len(self.done) + len(self.refused) < len(self.all):
            self.reap()
            self.begin()
            show(self.state())
            if self.running:
                time.sleep(POLL)

    def begin(self) -> None:
        """Starts what may start. What is done already counts at once; what starts from a refused job is refused."""
        for job in self.waiting():
            lost = next((name for name in job.after if name in self.refused), None)
            if lost:
                self.refused[job.name] = self.refused[lost]
            elif not self.done.issuperset(job.after):
                continue
            elif job.done():
                self.over(job)
            elif len(self.running) < self.width:
                self.running[job.name] = Child(job, started(job), time.monotonic())

    def waiting(self) -> list[Job]:
        """Those not begun, in their order."""
        gone = self.done | self.refused.keys() | self.running.keys()
        return [job for job in self.all.values() if job.name not in gone]

    def reap(self) -> None:
        """Takes note of children that ended."""
        for name, child in list(self.running.items()):
            code = child.process.poll()
            if code is None:
                continue
            del self.running[name]
            if code:
                text = f"{name} ended with {code}: {last_line(child.job.log)}; see {child.job.log}"
                raise Failed(text, UNFORESEEN if code == 1 else code if code > 0 else 128 - code)
            self.spent += time.monotonic() - child.began
            self.worked += child.job.cost
            self.over(child.job)

    def over(self, job: Job) -> None:
        """A job is done, or refused."""
        problem = job.check()
        if problem is None:
            self.done.add(job.name)
        else:
            self.refused[job.name] = problem

    def state(self) -> State:
        """How far everything is."""
        running = {name: child.share for name, child in self.running.items()}
        return State(len(self.done) + len(self.refused), len(self.all), running, self.left(time.monotonic()))

    def left(self, now: float) -> float:
        """Seconds until the last job ends, as if they started in order whenever there is room."""
        seen = [
            (now - child.began, child.share * child.job.cost) for child in self.running.values() if child.share > 0.15
        ]
        took, work = self.spent + sum(t for t, _ in seen), self.worked + sum(w for _, w in seen)
        pace = took / work if work else 1.0
        ends = {name: (1 - child.share) * child.job.cost * pace for name, child in self.running.items()}
        free = sorted([*ends.values(), *[0.0] * (self.width - len(ends))])[: self.width]
        for job in self.waiting():
            ready = max((ends.get(name, 0.0) for name in job.after), default=0.0)
            ends[job.name] = max(free.pop(0), ready) + job.cost * pace
            free = sorted([*free, ends[job.name]])
        return max(ends.values(), default=0.0)

    def stop(self) -> None:
        """Asks the children to end, which commits a step, and ends those that do not."""
        for child in self.running.values():
            child.process.terminate()
        until = time.monotonic() + PATIENCE
        for child in self.running.values():
            try:
                child.process.wait(max(0.1, until - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                child.process.kill()
                child.process.wait()
        self.running.clear()


def started(job: Job) -> subprocess.Popen[bytes]:
    """A child with one thread and a group of its own, so that Ctrl-C reaches it once, through us."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"), "1")
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **one},
            start_new_session=True,
        )  # fmt: skip


def last_line(log: Path) -> str:
    """The last thing that a child said."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.removeprefix("laconic: ").strip() for line in reversed(lines) if line.strip()), "it said nothing")


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM is Ctrl-C inside, so that children are stopped on both."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
