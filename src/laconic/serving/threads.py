"""Run work on tensors outside the engine's thread without slowing that thread down."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
NICENESS = 5  # gives a quarter of the cores' time beside threads of normal priority, as prompts get beside decoding
MAX_NICENESS = 19


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
