"""Long work on the model outside the engine: compressing texts, and learning from them. Jobs take turns."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from laconic.errors import LaconicError
from laconic.serving.engine import QueueFullError
from laconic.serving.http.limits import Deadline
from laconic.serving.threads import lower_priority, start_thread

T = TypeVar("T")
MAX_JOBS = 8  # each holds what it has computed so far, so that their number bounds the memory


class JobCancelledError(LaconicError):
    """The client has gone, the request took too long, or the server ends."""


class Worker:
    """Runs one job at a time, each until it calls the function that it is given; then the next one goes on.

    So a short text waits for one piece of each longer one, not for the whole of it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards what follows
        self.jobs = deque[threading.Event]()  # set once a job is cancelled; the first one runs
        self.is_closed = False

    async def run(self, work: Callable[[Callable[[], None]], T], deadline: Deadline) -> T:
        """Run a job and wait for it.

        `work` is called with a function that it calls after each piece of work, which lets other jobs go on and raises
        `JobCancelledError` once nobody waits for the result.

        Raises:
            QueueFullError: If too many jobs run.
            ApiError: 408, or 503, at the deadline.
        """
        job = threading.Event()
        with self.changed:
            if len(self.jobs) >= MAX_JOBS:
                raise QueueFullError(f"{len(self.jobs)} texts are being read; try again later")
            self.jobs.append(job)

        def run_in_turns() -> T:
            try:
                lower_priority()
                self.wait_for_turn(job)
                return work(lambda: self.pass_turn_on(job))
            finally:
                self.remove(job)

        try:
            future = start_thread(run_in_turns)
        except RuntimeError:  # there can be no more threads
            self.remove(job)
            raise
        try:
            async with deadline.limit():
                return await asyncio.wrap_future(future)
        finally:
            job.set()

    def wait_for_turn(self, job: threading.Event) -> None:
        """Wait until a job is the first one. Raises JobCancelledError if nobody waits for it any more."""
        with self.changed:
            self.changed.wait_for(lambda: self.jobs[0] is job)
        if job.is_set() or self.is_closed:
            raise JobCancelledError("cancelled")

    def pass_turn_on(self, job: threading.Event) -> None:
        """Let the other jobs go on, the one that has waited longest first, and wait for the next turn."""
        with self.changed:
            self.jobs.rotate(-1)
            self.changed.notify_all()
        self.wait_for_turn(job)

    def remove(self, job: threading.Event) -> None:
        with self.changed:
            self.jobs.remove(job)
            self.changed.notify_all()

    def close(self) -> None:
        """Cancel all jobs and wait for them to end."""
        self.is_closed = True
        with self.changed:
            self.changed.wait_for(lambda: not self.jobs)
