"""Handle SIGTERM, SIGINT, SIGUSR1 and SIGHUP: the first requests a stop after the current step, a second exits at once.

A closed terminal may send SIGHUP twice, so SIGHUP does not count as a second signal. Under `nohup` it is ignored.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from laconic.console import log_message
from laconic.errors import PreemptedError

HANGUP = getattr(signal, "SIGHUP", None)  # Windows has neither it nor SIGUSR1
ABORT_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


class SignalInterruptError(BaseException):
    """Raised by a signal in work that can be repeated; not an `Exception`, so that none of its handlers catches it."""


class StopSignal:
    """Whether a signal has requested a stop, which one, and whether it interrupted work."""

    def __init__(self) -> None:
        self.signal = 0
        self.was_interrupted = self.is_interruptible = False

    @property
    def signal_name(self) -> str:
        return signal.Signals(self.signal).name

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let signals raise `SignalInterruptError` inside this context; for work that changes nothing."""
        self.is_interruptible = True
        try:
            if self.signal:
                raise SignalInterruptError
            yield
        finally:
            self.is_interruptible = False

    @contextmanager
    def preemptible(self) -> Iterator[None]:
        """Let a signal end work that precedes the first update, by `PreemptedError`."""
        try:
            with self.interruptible():
                yield
        except SignalInterruptError:
            text = f"{self.signal_name}: stopped before the first update; run the same command again"
            raise PreemptedError(text) from None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the first signal; installed as signal handler."""
        self.signal = self.signal or number
        if self.is_interruptible:
            raise SignalInterruptError


@contextmanager
def handle_signals() -> Iterator[StopSignal]:
    """Handle signals inside this context; a second one ends the process with 128 + its number.

    A thread waits for the second signal, because Python's handlers run only between bytecode instructions of the main
    thread and an operation may take long. Outside the main thread no handler can be installed and nothing changes.
    """
    stop = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stops_at_hangup = HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN
    numbers = [*ABORT_SIGNALS, HANGUP] if stops_at_hangup else ABORT_SIGNALS
    handlers = {number: signal.signal(number, stop.handle) for number in numbers}
    old_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_abort_at_second, args=(reader, stop), daemon=True).start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)


def _abort_at_second(reader: int, stop: StopSignal) -> None:
    """Say at the first Ctrl-C that the current step is finished first, and exit the process at the second signal."""
    count = 0
    while byte := os.read(reader, 1):
        count += byte[0] in ABORT_SIGNALS
        if count == 1 and byte[0] == signal.SIGINT and not stop.is_interruptible:
            log_message("laconic: stopping after this step; a second Ctrl-C ends at once, without saving")
        if count > 1:
            os._exit(128 + byte[0])
    os.close(reader)
