"""Work on tensors beside the engine runs in threads that end, so that no OpenMP pool outlives it."""

import asyncio
import threading

import pytest

from laconic.serving.http.worker import run_in_thread
from tests.house.source import texts

LASTING_THREADS = ("to_thread", "run_in_executor", "run_in_threadpool")
EXCEPTIONS = {("services.py", "run_in_threadpool")}  # an upload writes bytes to a file


def test_run_in_thread_ends_its_thread() -> None:
    threads: list[threading.Thread] = []

    def work(number: int) -> int:
        threads.append(threading.current_thread())
        return number // (number - 2)

    assert asyncio.run(run_in_thread(work, 4)) == 2
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in_thread(work, 2))
    for thread in threads:
        thread.join()
    assert len(set(threads)) == 2
    assert threading.current_thread() not in threads


def test_serving_uses_no_lasting_threads_for_tensors() -> None:
    used = {
        (path.name, name)
        for path, text in texts("src/laconic/serving")
        for name in LASTING_THREADS
        if f"{name}(" in text
    }
    assert used == EXCEPTIONS
