"""Messages and progress on standard error."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

ProgressFn = Callable[[str, int, int], None]
LOG_INTERVAL = 5  # seconds between progress lines without a terminal


def log_message(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def is_interactive() -> bool:
    """Return whether standard error is a terminal that supports progress bars."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def log_note(text: str) -> None:
    """Print a line of lesser importance to standard error, dim on a terminal with colours."""
    should_dim = is_interactive() and "NO_COLOR" not in os.environ
    log_message(f"\x1b[2m{text}\x1b[0m" if should_dim else text)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Show a spinner with a text on a terminal."""
    if not is_interactive():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextlib.contextmanager
def progress(text: str) -> Iterator[ProgressFn]:
    """Show progress with the time left: a bar on a terminal, elsewhere a line every few seconds.

    Yields a function to call with (name, done, total); a total of 0 means unknown.
    """
    if not is_interactive():
        yield log_progress(text)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(text, total=None)
        yield lambda name, done, total: bar.update(
            task, description=f"{text} {name}", completed=done, total=total or None
        )


def log_progress(text: str) -> ProgressFn:
    """Return a function that logs progress and the seconds left, at most once per LOG_INTERVAL."""
    start = last = time.monotonic()

    def update(name: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done and now - last >= LOG_INTERVAL:
            last = now
            remaining = (now - start) / done * (total - done)
            log_message(f"{text} {name}" + (f": {done} of {total}, {remaining:.0f} s left" if total else ""))

    return update
