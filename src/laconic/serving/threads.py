"""Run work on tensors outside the engine's thread without slowing that thread down."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


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


async def run_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread that ends with it, and return its result or raise its error."""
    return await asyncio.wrap_future(start_thread(partial(function, *arguments)))
