"""What a person sees while a command runs: notes and progress on standard error, and which files were written."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def write_file(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    from laconic.storage import atomic

    atomic.write_file_atomically(path, lambda new: new.write_text(text, encoding="utf-8"))
    log_message(f"wrote {path}")


def log_message(text: str) -> None:
    """A note for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def is_interactive() -> bool:
    """Whether standard error is a terminal that may be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Says on a terminal what is under way."""
    if not is_interactive():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar with the time left on a terminal, elsewhere one line in ten seconds; call it with name, done and total.

    A total of 0 is not known, and no time is left then.
    """
    if not is_interactive():
        yield log_progress(text)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda name, done, total: bar.update(
            task, description=f"{text} {name}", completed=done, total=total or None
        )


def log_progress(text: str) -> Callable[[str, int, int], None]:
    """Progress where there is no terminal: what is under way and the seconds left, at most once in ten seconds."""
    began = said = time.monotonic()

    def show(name: str, done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if done and now - said >= 10:
            said = now
            left = f": {done} of {total}, {(now - began) / done * (total - done):.0f} s left" if total else ""
            log_message(f"{text} {name}{left}")

    return show
