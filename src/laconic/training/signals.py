"""SIGTERM, SIGINT and SIGUSR1: the first asks for an end after the step under way, the second ends at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class SignalInterruptError(BaseException):
    """A signal came while something ran that may be left and done again; no `except Exception` holds it up."""


class StopSignal:
    """Whether a signal has asked for the end, and which; whether something was left for it."""

    def __init__(self) -> None:
        self.signal, self.was_interrupted = 0, False
        self._is_interruptible = False

    @property
    def signal_name(self) -> str:
        return signal.Signals(self.signal).name

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, a signal raises `Interrupted` at once; for what changes nothing."""
        self._is_interruptible = True
        try:
            if self.signal:
                raise SignalInterruptError
            yield
        finally:
            self._is_interruptible = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What a signal does: the first is remembered."""
        self.signal = self.signal or number
        if self._is_interruptible:
            raise SignalInterruptError


@contextmanager
def handle_signals() -> Iterator[StopSignal]:
    """Signals are heard inside; a second one ends the process with 128 + its number, also amid a long operation.

    A thread waits for the second, since Python's own handlers run only between operations of the main thread.
    Outside the main thread nothing can be heard, and nothing is changed.
    """
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    out, into = os.pipe()
    os.set_blocking(into, False)
    before = {number: signal.signal(number, stop.handle) for number in STOP_SIGNALS}
    fd = signal.set_wakeup_fd(into, warn_on_full_buffer=False)
    threading.Thread(target=_abort_at_second, args=(out,), daemon=True).start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(into)


def _abort_at_second(out: int) -> None:
    asked = 0
    while byte := os.read(out, 1):
        asked += byte[0] in STOP_SIGNALS
        if asked > 1:
            os._exit(128 + byte[0])
    os.close(out)
