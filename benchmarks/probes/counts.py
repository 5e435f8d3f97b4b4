"""Count what happened in the trials of a probe, and format the counts as rows of a table."""

import sys
import time
from dataclasses import dataclass, field, replace

HEADER = (
    "command",
    "attempted",
    "survived",
    "committed work lost",
    "found",
    "harmless",
    "silent",
    "peer",
)
ABSENT = "–"
PROGRESS_SECONDS = 5.0


@dataclass
class Counts:
    """Outcomes of the trials of one row.

    Attributes:
        name: Command or file under test.
        command: Command that repeats a trial, without its number.
        attempted: Number of kills, damaged files, signals, …
        survived: Trials after which the command went on, or refused in one line, and ended as if nothing had happened.
        lost: Trials after which committed work was gone; None if the probe cannot lose any.
        detected: Damage that was reported.
        harmless: Damage that was not reported and changed nothing.
        silent: Damage that was not reported and changed the result.
        peer: What a peer made of the same.
        failures: One line for each trial that did not survive.
    """

    name: str
    command: str
    attempted: int = 0
    survived: int = 0
    lost: int | None = None
    detected: int | None = None
    harmless: int | None = None
    silent: int | None = None
    peer: str | None = None
    failures: list[str] = field(default_factory=list[str])
    next_line: float = 0.0

    def fail(self, trial: int, reason: str) -> None:
        """Record a trial that did not survive and print the command that repeats it."""
        self.failures.append(f"{self.name}: {reason}")
        print(f"FAILED {self.name}: {reason}\n  repeat: {self.command} --trial {trial}", file=sys.stderr, flush=True)

    def show_progress(self, total: int) -> None:
        """Print the counts so far, at most once in a few seconds."""
        if time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + PROGRESS_SECONDS
            print(f"  {self.name}: {self.attempted} of {total}, {self.survived} survived", file=sys.stderr, flush=True)

    def cells(self) -> tuple[str, ...]:
        """Return the row."""
        numbers = (self.attempted, self.survived, self.lost, self.detected, self.harmless, self.silent)
        return (self.name, *(ABSENT if n is None else f"{n:,}" for n in numbers), self.peer or ABSENT)


def add_up(rows: list[Counts], name: str) -> Counts:
    """Return the sum of several rows."""

    def total(key: str) -> int | None:
        numbers = [n for row in rows if (n := getattr(row, key)) is not None]
        return sum(numbers) if numbers else None

    keys = ("lost", "detected", "harmless", "silent")
    sums = Counts(name, "", sum(row.attempted for row in rows), sum(row.survived for row in rows))
    return replace(sums, **{key: total(key) for key in keys})
