"""Run commands in odd surroundings, each in a new interpreter: closed pipes, no home, no terminal, other locales, …"""

import ctypes
import os
import pty
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import REPO
from benchmarks.probes.counts import Counts
from benchmarks.probes.kills import Reference
from benchmarks.probes.processes import ENVIRONMENT, MAX_SECONDS, run_command_line
from benchmarks.probes.works import EVALUATED, Work, build_works, hash_files

PIPE_CLOSED = 141
FULL = 74
DROP, DAC_OVERRIDE = 24, 1  # a call of prctl, and the capability by which root writes everywhere


@dataclass(frozen=True)
class Surroundings:
    """How a command is started, and which exit codes are right.

    Attributes:
        name: Their name.
        environment: Variables to set; None removes one.
        shell: Command line of the shell; `{}` stands for laconic's.
        codes: Exit codes that are right.
        setup: Prepares the folder and returns the one in which the command runs.
        is_read_only: Whether nothing may be written to the folder, not even by root.
        is_terminal: Whether it runs in a terminal.
        umask: Mask of the files' modes, which the files must have; None leaves it.
    """

    name: str
    environment: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    shell: str = "{}"
    codes: tuple[int, ...] = (0,)
    setup: Callable[[Path], Path] = lambda folder: folder
    is_read_only: bool = False
    is_terminal: bool = False
    umask: int | None = None


def make_unicode_folder(folder: Path) -> Path:
    """Return a subfolder whose name has characters of four bytes, right-to-left text, and a space."""
    inside = folder / "наука 🜚 שלום"
    inside.mkdir()
    return inside


SURROUNDINGS = (
    Surroundings("no HOME", {"HOME": None}),
    Surroundings("HOME does not exist", {"HOME": "/nonexistent"}),
    Surroundings("temporary folder does not exist", {"TMPDIR": "/nonexistent"}),
    Surroundings("locale C, no UTF-8", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    Surroundings("folder with a name in Unicode", setup=make_unicode_folder),
    Surroundings(
        "that folder in locale C",
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        setup=make_unicode_folder,
    ),
    Surroundings("a terminal", is_terminal=True),
    Surroundings("a dumb terminal of 3 columns", {"TERM": "dumb", "COLUMNS": "3"}, is_terminal=True),
    Surroundings("python -OO", {"PYTHONOPTIMIZE": "2"}),
    Surroundings("standard input closed", shell="{} <&-"),
    Surroundings("standard output closed", shell="{} >&-"),
    Surroundings("standard error closed", shell="{} 2>&-"),
    Surroundings("all three closed", shell="{} <&- >&- 2>&-"),
    Surroundings("reader of the output gone", shell="set -o pipefail; {} | true", codes=(0, PIPE_CLOSED)),
    Surroundings("reader of the messages gone", shell="set -o pipefail; {} 2>&1 >/dev/null | true"),
    Surroundings("messages to a full device", shell="{} 2>/dev/full"),
    Surroundings("under nohup, SIGHUP ignored", shell="nohup {}"),
    Surroundings("umask 002", umask=0o002),
    Surroundings("umask 027", umask=0o027),
    Surroundings("umask 077", umask=0o077),
    Surroundings("folder is read-only", codes=(FULL,), is_read_only=True),
)  # fmt: skip


def start_shell(case: Surroundings, line: str, folder: Path) -> tuple[int, str]:
    """Run a shell command in its surroundings; return the exit code and what it printed to standard error."""
    environment: dict[str, str] = {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{REPO}/src", "OMP_NUM_THREADS": "1"}
    for name, value in case.environment.items():
        environment.pop(name, None)
        environment |= {} if value is None else {name: value}
    options: dict[str, Any] = {"cwd": folder, "env": environment, "umask": -1 if case.umask is None else case.umask}
    if case.is_read_only:
        options["preexec_fn"] = lambda: ctypes.CDLL(None).prctl(DROP, DAC_OVERRIDE, 0, 0, 0)
    if not case.is_terminal:
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        done = subprocess.run(["bash", "-c", line], **options, **pipes, start_new_session=True, timeout=MAX_SECONDS)
        return done.returncode, done.stderr.decode(errors="replace")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(["bash", "-c", line], **options, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = bytearray()
    with suppress(OSError):  # raised when the terminal's other end is closed
        while data := os.read(ours, 65536):
            output += data
    os.close(ours)
    return process.wait(), output.decode(errors="replace")


def find_wrong_modes(paths: Iterable[Path], umask: int) -> list[str]:
    """Return the files and folders that do not follow the umask."""
    return [str(p) for p in paths if p.stat().st_mode & 0o777 != (0o777 if p.is_dir() else 0o666) & ~umask]


def try_surroundings(case: Surroundings, home: Path, work: Work, expected: Mapping[str, Any]) -> str:
    """Run a command in these surroundings, in a new folder, and return what went wrong, "" if nothing."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    folder = case.setup(home)
    folder.chmod(0o755)
    work.setup(folder)
    before = set(folder.rglob("*"))
    for path in [folder, *before] if case.is_read_only else []:
        path.chmod(0o555)
    action = work.begin or work.run
    assert isinstance(action, partial), "a command line"
    line = shlex.join([sys.executable, "-m", "laconic", *map(str, action.args)])
    code, text = start_shell(case, case.shell.format(line), folder)
    if code not in case.codes or "Traceback" in text:
        return f"exit code {code}: {text.strip()[-300:]}"
    new = set(folder.rglob("*")) - before
    if code == FULL:
        return f"left {new}" if new else ""
    if work.take_snapshot(folder) != expected:
        return "the results differ"
    wrong = [] if case.umask is None else find_wrong_modes(new, case.umask)
    return f"modes of {wrong[:3]}" if wrong else ""


def tour_surroundings(tour: "Tour", place: Path, num_cases: int, trial: int | None, command: str) -> Counts:
    """Run the works of a tour in turn, in the first `num_cases` surroundings or in those of one trial."""
    counts, expected = Counts(f"{tour.name}, new interpreters", command), dict[str, Mapping[str, Any]]()
    for number in range(len(SURROUNDINGS))[:num_cases] if trial is None else [trial]:
        case, work = SURROUNDINGS[number], tour.works[number % len(tour.works)]
        if work.name not in expected:
            expected[work.name] = Reference(work, place / f"expected-{work.name.replace(' ', '-')}").snapshot
        problem = try_surroundings(case, place / "run", work, expected[work.name])
        counts.attempted += 1
        counts.survived += not problem
        if problem:
            counts.fail(number, f"{case.name}: {problem}")
        counts.show_progress(len(SURROUNDINGS))
    return counts


class Tour(NamedTuple):
    """Commands that take turns in the surroundings."""

    name: str
    works: list[Work]


def build_tours(base: Path) -> list[Tour]:
    """Return a row for each command."""
    names: dict[str, list[Work]] = {}
    for work in build_works(base).values():
        names.setdefault(work.name.split()[0], []).append(work)
    report = partial(run_command_line, "report", base / EVALUATED, "--out", "report.html")
    make = partial(run_command_line, "data", "make", "digits", "--out", "rows.jsonl", "--rows", 20)
    names["report"] = [Work("report", report, lambda folder: hash_files(folder, "report.html"), lambda folder: 0)]
    names["data"] = [
        Work(
            "data make", make, lambda folder: hash_files(folder, "rows.jsonl", "rows.held_out.jsonl"), lambda folder: 0
        )
    ]
    return [Tour(name, works) for name, works in names.items()]
