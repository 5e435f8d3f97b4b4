"""Child processes forked from this one, so that torch is imported once; they report progress and may be killed."""

import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable

from laconic.errors import LaconicError


class Child:
    """A forked process; `work` receives a function that sends a number to the parent."""

    def __init__(self, work: Callable[[Callable[[int], None]], None]) -> None:
        self._reader, into = os.pipe()
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
            os.close(self._reader)
            work(lambda number: os.write(into, number.to_bytes(4, "little")) and None)
            code = 0
        except LaconicError as error:
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait_for(self, number: int) -> None:
        """Wait until the child has sent `number` or a larger one."""
        while self.last < number:
            data = os.read(self._reader, 4)
            assert data, f"the child ended after {self.last}, expected {number}"
            self.last = int.from_bytes(data, "little")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, within: float = 20.0) -> int:
        """Wait for the end and return the exit code, 128 + the signal if it was killed."""
        deadline = time.monotonic() + within
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"the child did not end within {within} s")
            time.sleep(0.002)
        while data := os.read(self._reader, 4):
            self.last = int.from_bytes(data, "little")
        os.close(self._reader)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


def die() -> None:
    """Kill this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
