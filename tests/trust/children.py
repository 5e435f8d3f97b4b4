"""Processes forked from this one, so that torch is imported once: they work, are killed, and say how far they came."""

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable

from laconic.errors import LaconicError


class Child:
    """A forked process; `work` gets a function that tells the parent a number."""

    def __init__(self, work: Callable[[Callable[[int], None]], None]) -> None:
        self._told, into = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other threads of this process hold nothing that a child needs
            self.pid = os.fork()
        if self.pid == 0:
            self._run(work, into)
        os.close(into)
        self.last = -1

    def _run(self, work: Callable[[Callable[[int], None]], None], into: int) -> None:
        code = 70
        try:
            os.close(self._told)
            work(lambda number: os.write(into, number.to_bytes(4, "little")) and None)
            code = 0
        except LaconicError as error:
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait_for(self, number: int) -> None:
        """Until the child has told `number` or a larger one."""
        while self.last < number:
            told = os.read(self._told, 4)
            assert told, f"the child ended after telling {self.last}, waited for {number}"
            self.last = int.from_bytes(told, "little")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, within: float = 20.0) -> int:
        """Its exit code, 128 + the signal that killed it; the last number it told is in `last`."""
        until = time.monotonic() + within
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"the child did not end within {within} s")
            time.sleep(0.002)
        while told := os.read(self._told, 4):
            self.last = int.from_bytes(told, "little")
        os.close(self._told)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


def die() -> None:
    """As `kill -9` would have it."""
    os.kill(os.getpid(), signal.SIGKILL)
