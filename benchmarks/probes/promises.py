"""Promises of the command line, one row each: what is tried, and what Trainer, datasets or transformers make of it."""

import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.probes.counts import Counts
from benchmarks.probes.kills import describe
from benchmarks.probes.peers import TRACEBACK
from benchmarks.probes.processes import Action, Ending, run_command_line, run_forked

MAX_BYTES, MAX_CPU_SECONDS = 512 * 2**20, 60  # what a hostile file may cost
CANARY = "CANARY"  # file that code in a hostile file would write
Check = Callable[[Path], str]  # tries something in a new folder; returns what went wrong, "" if nothing


@dataclass(frozen=True)
class Promise:
    """A row of the table.

    Attributes:
        name: Id and what is promised.
        checks: What is tried, by name.
        peer: Name of the peer.
        peer_checks: The same for the peer.
    """

    name: str
    checks: Mapping[str, Check]
    peer: str = ""
    peer_checks: Mapping[str, Check] = field(default_factory=dict[str, Check])


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate so many bytes of address space more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def limit_costs() -> None:
    """Let this process allocate 512 MB more than now, and take a minute of CPU time."""
    limit_memory(MAX_BYTES)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))


def expect(
    action: Action,
    *codes: int,
    setup: Callable[[Path], object] = lambda folder: None,
    words: str = "",
    check: Callable[[Path, Ending], str] = lambda folder, ending: "",
    prepare: Callable[[], object] | None = None,
) -> Check:
    """Return a check that runs a command in a folder that `setup` filled, after calling `prepare` in its process.

    The command must end with one of `codes`, print `words`, and change nothing outside the folder; a traceback is
    allowed only if `codes` have `TRACEBACK`. `check` then returns what else went wrong.
    """

    def run(folder: Path) -> str:
        setup(folder)
        before = {path for path in folder.parent.iterdir() if not path.name.startswith(folder.name)}
        ending = run_forked(action, folder, prepare)
        if ending.code not in codes or ("Traceback" in ending.err and TRACEBACK not in codes):
            return describe(ending)
        if words not in ending.err + ending.out:
            return f"the message lacks {words!r}: {ending.err.strip()[-300:]}"
        after = {path for path in folder.parent.iterdir() if not path.name.startswith(folder.name)}
        if after != before or list(folder.rglob(CANARY)):
            return f"wrote outside, or ran code: {after - before}"
        return check(folder, ending)

    return run


def command(*arguments: object) -> Action:
    """Return a command line of laconic."""
    return partial(run_command_line, *arguments)


def keep_promises(promise: Promise, place: Path, limit: int, trial: int | None, repeat: str) -> Counts:
    """Try the first `limit` checks of a promise, or one of them, and those of its peer."""
    counts, home = Counts(promise.name, repeat), place / "promise"
    for number, (name, check) in enumerate(list(promise.checks.items())[:limit]):
        if trial in (None, number):
            problem = try_check(check, home)
            counts.attempted += 1
            counts.survived += not problem
            if problem:
                counts.fail(number, f"{name}: {problem}")
            counts.show_progress(min(limit, len(promise.checks)))
    peers = [] if trial is not None else list(promise.peer_checks.values())[:limit]
    if peers:
        survived = sum(not try_check(check, home) for check in peers)
        counts.peer = f"{promise.peer}: {survived:,} of {len(peers):,}"
    return counts


def try_check(check: Check, home: Path) -> str:
    """Run a check in a folder of its own."""
    shutil.rmtree(home, ignore_errors=True)
    (home / "inside").mkdir(parents=True)
    return check(home / "inside")


def copy(source: Path, *changes: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a setup that copies a folder of the same name and changes the copy."""

    def setup(folder: Path) -> None:
        shutil.copytree(source, folder / source.name)
        for change in changes:
            change(folder / source.name)

    return setup


def write(name: str, content: bytes) -> Callable[[Path], object]:
    """Return a setup that writes a file."""
    return lambda folder: (folder / name).write_bytes(content)


def together(*setups: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return several setups as one."""

    def setup(folder: Path) -> None:
        for one in setups:
            one(folder)

    return setup


def close_network() -> None:
    """Report every attempt to reach the network on standard error."""

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
            os.write(2, f"NETWORK {event} {args}\n".encode())

    os.environ.pop("HF_HUB_OFFLINE", None)
    sys.addaudithook(hook)
