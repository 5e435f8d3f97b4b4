"""Messages and progress on standard error, and tables for notebooks."""

import contextlib
import html
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

ProgressFn = Callable[[str, int, int], None]
FIRST_LINE_AFTER = 2.0  # seconds without a terminal
LOG_INTERVAL = 5  # seconds between later lines
UNCHANGED_INTERVAL = 30  # seconds between lines if nothing has changed
# Control characters except line ends and tabs, and those that change the direction of text.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Return a text that may come from a file with control characters and changes of direction as escapes."""
    return CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def pluralize(n: int, noun: str) -> str:
    """Return a number and a noun, such as "1 token" or "2,000 tokens"."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def log_message(text: str) -> None:
    """Print a line to standard error, control characters as escapes, as long as somebody can read it."""
    print_to_stderr(escape_controls(text))


def print_to_stderr(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # a closed pipe, a terminal that is gone, a full disk
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def open_missing_streams() -> None:
    """Open the null device for each standard stream that was closed before the process started.

    Otherwise the next file that is opened would be standard output or error, and messages would be written into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def is_interactive() -> bool:
    """Return whether standard error is a terminal that supports progress bars."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def log_note(text: str) -> None:
    """Print a line of lesser importance to standard error, dim on a terminal with colours."""
    should_dim = is_interactive() and "NO_COLOR" not in os.environ
    line = escape_controls(text)
    print_to_stderr(f"\x1b[2m{line}\x1b[0m" if should_dim else line)


def print_rich(content: Any, width: int | None = None) -> None:
    """Print a table of rich; a closed pipe raises `BrokenPipeError`, where rich itself would exit with code 1."""
    from rich.console import Console

    console = Console(highlight=False, width=width)
    with console.capture() as captured:
        console.print(content)
    print(captured.get(), end="", flush=True)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Show a spinner with a text on a terminal; elsewhere print the text while it takes long, as `progress` does."""
    if not is_interactive():
        with progress(text):
            yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextlib.contextmanager
def progress(text: str) -> Iterator[ProgressFn]:
    """Yield a function of (name, done, total) that shows progress and the time left; a total of 0 means unknown.

    It shows a bar on a terminal, elsewhere a line after two seconds, and every five, or thirty if nothing has changed.
    """
    if not is_interactive():
        log = ProgressLog(text)
        with call_every_second(log.print_if_due):
            yield log.update
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(text, total=None)
        yield lambda name, done, total: bar.update(
            task, description=f"{text} {name}".rstrip(" ,"), completed=done, total=total or None
        )


@contextlib.contextmanager
def call_every_second(function: Callable[[], None]) -> Iterator[None]:
    """Call a function from another thread while the block runs."""
    is_over = threading.Event()

    def call() -> None:
        while not is_over.wait(1.0):
            function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class ProgressLog:
    """Progress as lines on standard error, with the seconds left of a phase, which begins where `done` falls.

    The seconds left are estimated from the first report of a phase on, since work may begin in the middle.
    """

    def __init__(self, text: str) -> None:
        self.text, self.name, self.done, self.total, self.first = text, "", 0, 0, 0
        self.changed = self.first_time = time.monotonic()
        self.last = self.changed + FIRST_LINE_AFTER - LOG_INTERVAL

    def update(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if (name, done) != (self.name, self.done):
            self.changed = now
        if done < self.done or not self.total:
            self.first, self.first_time = done, now
        self.name, self.done, self.total = name, done, total
        self.print_if_due()

    def print_if_due(self) -> None:
        """Print what was reported last, unless the last line is recent."""
        now = time.monotonic()
        if now < self.last + (LOG_INTERVAL if self.changed > self.last else UNCHANGED_INTERVAL):
            return
        self.last = now
        line = f"{self.text} {self.name}".rstrip(" ,")
        if self.total:
            line += f": {self.done:,} of {self.total:,}"
        if self.total and self.done > self.first:
            seconds = (now - self.first_time) / (self.done - self.first)
            line += f", {format_duration(seconds * (self.total - self.done))} left"
        elif now - self.changed >= LOG_INTERVAL:
            line += f", {format_duration(now - self.changed)}"
        log_message(line if self.total else f"{line} …")


def format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 172800:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"


def to_html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [("th", header), *(("td", row) for row in rows)]
    cells = ["".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row) for tag, row in lines]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
