"""Run commands in processes forked from this one, in which torch and laconic are imported, and kill them."""

import gc
import importlib
import os
import pkgutil
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import laconic
from laconic.cli.main import main
from tests.trust.children import Child

Action = Callable[[], int]  # runs in a child process and returns its exit code
KILLED = 128 + signal.SIGKILL
INTERRUPTED = 128 + signal.SIGINT
MAX_SECONDS = 300.0  # of a command; longer means that it hangs
DELAY = 0.004  # longest wait, in seconds, between a write and the kill that follows it
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
WRITE_EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}
COMMIT = re.compile(r"(?:step|checkpoint)-(\d+)")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "SOURCE_DATE_EPOCH": "0", "TOKENIZERS_PARALLELISM": "false"}


class Moment(NamedTuple):
    """When a process is killed.

    Attributes:
        write: Number of the write at which it is killed, counted from 0; -1 for any time.
        delay: Seconds after this write, or after the start; 0 kills the process before the write.
    """

    write: int
    delay: float


class Ending(NamedTuple):
    """Exit code and output of a process, and how many writes it began."""

    code: int
    out: str
    err: str
    num_writes: int
    seconds: float


def warm_up() -> None:
    """Import all of laconic, which a command would import on its way."""
    for module in pkgutil.walk_packages(laconic.__path__, "laconic."):
        if "vllm" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()  # children share these pages


def run_command_line(*arguments: object) -> int:
    """Run `laconic` with arguments in this process and return its exit code."""
    sys.argv = ["laconic", *map(str, arguments)]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


class WriteCounter:
    """An audit hook that counts changes below a folder, and kills its process before one of them.

    It lists commits (steps and checkpoints that have their final name) in a journal, by which the parent knows what
    must survive.
    """

    def __init__(self, folder: Path, kill_at: int, report: Callable[[int], None], journal: Path) -> None:
        self.prefix, self.kill_at, self.report = f"{folder}{os.sep}", kill_at, report
        self.journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.number, self.pending = 0, ""

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if event == "open":
            is_write = isinstance(args[2], int) and args[2] & WRITE_FLAGS
        else:
            is_write = event in WRITE_EVENTS
        if not is_write or not isinstance(args[0], str | bytes | os.PathLike):
            return
        if not os.path.abspath(os.fsdecode(args[0])).startswith(self.prefix):
            return
        if self.pending:
            os.write(self.journal, f"{self.pending}\n".encode())
        if self.number == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        name = os.path.basename(os.fsdecode(args[1])) if event == "os.rename" else ""  # type: ignore[arg-type]
        commit = COMMIT.fullmatch(name)
        self.pending = commit[1] if commit else ""
        self.report(self.number)
        self.number += 1


class ForkedCommand:
    """A command in a forked process with the current directory `folder`; its output goes to files beside the folder."""

    def __init__(
        self,
        action: Action,
        folder: Path,
        kill_at: int = -1,
        prepare: Callable[[], object] | None = None,
        log: str = "",
    ) -> None:
        self.logs = [folder.with_name(f"{log or folder.name}.{name}") for name in ("out", "err")]
        self.journal = folder.with_name(f"{log or folder.name}.journal")
        for path in (*self.logs, self.journal):
            path.write_bytes(b"")
        self.start = time.perf_counter()

        def work(report: Callable[[int], None]) -> None:
            os.chdir(folder)
            os.environ |= ENVIRONMENT
            for number, path in enumerate(self.logs, 1):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(descriptor, number)
            # pytest has put streams of its own in their place
            sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, "utf-8", "backslashreplace", closefd=False) for n in (1, 2))
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.addaudithook(WriteCounter(folder.resolve(), kill_at, report, self.journal))
            if prepare is not None:
                prepare()
            code = action()
            while True:
                try:
                    for stream in (sys.stdout, sys.stderr):
                        with suppress(OSError, ValueError):
                            stream.flush()
                    os._exit(code)
                except KeyboardInterrupt:  # Ctrl-C after the action changes nothing
                    continue

        sys.stdout.flush()
        sys.stderr.flush()
        self.child = Child(work)

    def wait_for_write(self, number: int) -> None:
        """Wait until the process begins a write, or ends."""
        with suppress(AssertionError):
            self.child.wait_for(number)

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        with suppress(ProcessLookupError):
            self.child.signal(number)

    def has_ended(self) -> bool:
        """Return whether the process has ended; it can still be waited for."""
        return os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> Ending:
        """Wait for the end."""
        code = self.child.end(MAX_SECONDS)
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in self.logs)
        return Ending(code, out, err, self.child.last + 1, time.perf_counter() - self.start)

    @property
    def commits(self) -> list[int]:
        """Numbers of the steps that had their final name before the process ended."""
        return [int(line) for line in self.journal.read_text().split()]


def run_forked(action: Action, folder: Path, prepare: Callable[[], object] | None = None) -> Ending:
    """Run a command to its end."""
    return ForkedCommand(action, folder, prepare=prepare).wait()


def choose_moment(trial: random.Random, num_writes: int, seconds: float) -> Moment:
    """Choose when to kill a process: usually at or shortly after a write, one time in five at any time."""
    draw = trial.random()
    if draw < 0.2:
        return Moment(-1, trial.uniform(0, seconds))
    number = trial.randrange(max(1, num_writes))
    return Moment(number, 0.0 if draw < 0.6 else trial.uniform(1e-6, DELAY))


def run_until(action: Action, folder: Path, moment: Moment) -> tuple[Ending, list[int]]:
    """Run a command, kill it at a moment, and return how it ended and the steps that it had committed."""
    is_sudden = moment.write >= 0 and not moment.delay
    command = ForkedCommand(action, folder, moment.write if is_sudden else -1)
    if not is_sudden:
        if moment.write >= 0:
            command.wait_for_write(moment.write)
        time.sleep(moment.delay)
        command.send_signal(signal.SIGKILL)
    return command.wait(), command.commits
