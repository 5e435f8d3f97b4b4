"""One thread for long work on the model outside the engine: compressing texts, and learning from them."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from laconic.errors import LaconicError
from laconic.serving.http.api_error import queue_full_error
from laconic.serving.http.deadline import Deadline
from laconic.serving.threads import start_thread

T = TypeVar("T")
MAX_WAITING = 8  # jobs that wait, beside the one that runs


class JobCancelledError(LaconicError):
    """The client has gone, or the request took too long."""


class Worker:
    """Runs jobs one after the other. A job calls the function that it is given often; it raises to end the job."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="laconic-worker")
        self.num_jobs = 0

    async def run(self, job: Callable[[Callable[[], None]], T], deadline: Deadline) -> T:
        """Run a job in the thread and wait for it.

        Args:
            job: Called with a function that raises `JobCancelledError` once nobody waits for the result.
            deadline: When the job is cancelled.

        Raises:
            ApiError: 429 if too many jobs wait; 408, or 503, at the deadline.
        """
        if self.num_jobs > MAX_WAITING:
            raise queue_full_error(f"{self.num_jobs} texts wait to be read; try again later")
        is_cancelled = threading.Event()

        def check() -> None:
            if is_cancelled.is_set():
                raise JobCancelledError("cancelled")

        def run_checked() -> T:
            check()
            return start_thread(lambda: job(check)).result()

        self.num_jobs += 1
        future = asyncio.get_running_loop().run_in_executor(self.executor, run_checked)
        future.add_done_callback(self.finish)
        try:
            async with deadline.limit():
                return await asyncio.shield(future)
        except TimeoutError:
            message = "the text took too long to read; shorten it, or raise --max-seconds"
            raise deadline.build_error(message) from None
        finally:
            is_cancelled.set()

    def finish(self, future: asyncio.Future[Any]) -> None:
        """Count a job that has ended, and take its error if nobody waits for it any more."""
        self.num_jobs -= 1
        with suppress(asyncio.CancelledError):
            future.exception()

    def close(self) -> None:
        """Wait for the running job; drop those that wait."""
        self.executor.shutdown(cancel_futures=True)
