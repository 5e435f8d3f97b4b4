"""Work on the model outside the engine's thread; long texts are compressed and learned in turns."""

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from laconic.errors import LaconicError
from laconic.serving.engine import QueueFullError
from laconic.serving.http.limits import Deadline

T = TypeVar("T")
NICENESS = 5  # gives a quarter of the cores' time beside threads of normal priority, as prompts get beside decoding
MAX_NICENESS = 19
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
        self.is_closed = True
        with self.changed:
            self.changed.wait_for(lambda: not self.jobs)


def start_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread that ends with it.

    All work on tensors beside the engine has to be run like this. OpenMP keeps a pool of workers for every living
    thread that has run a parallel operation. While there are more of these than cores, idle workers no longer wait
    actively, and each of the hundreds of small operations of a decoding step waits for them to wake up: on two cores a
    step takes 48 instead of 29 ms, until the thread ends. Threads of executors live on.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on a caller that gives up does not cancel it

    def work() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="laconic-job", daemon=True).start()
    return outcome


def lower_priority() -> None:
    """Let other threads run first where they compete with this one, and those that it starts, for cores; on Linux."""
    if sys.platform == "linux":
        id = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, id, min(os.getpriority(os.PRIO_PROCESS, id) + NICENESS, MAX_NICENESS))


async def run_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread that ends with it, and return its result or raise its error."""
    return await asyncio.wrap_future(start_thread(partial(function, *arguments)))
