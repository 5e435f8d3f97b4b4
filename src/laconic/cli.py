"""The door: which verb was meant, and the exit code of every way to end."""

import contextlib
import io
import os
import re
import sys
import warnings
from itertools import takewhile
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

from laconic.console import say
from laconic.verbs.compress import Compress
from laconic.verbs.data import Check, List
from laconic.verbs.demo import Demo
from laconic.verbs.evaluate import Evaluate
from laconic.verbs.export import Export
from laconic.verbs.generate import Generate
from laconic.verbs.inspect import Inspect
from laconic.verbs.make import Make
from laconic.verbs.report import Report
from laconic.verbs.train import Train, rewritten
from laconic.verbs.verify import All, Ledger, Parity

USAGE, MISSING, BUG, MEMORY, INPUT_OUTPUT, INTERRUPTED, PIPE_CLOSED = 2, 66, 70, 71, 74, 130, 141
EXTRAS = {
    **dict.fromkeys(("transformers", "peft", "datasets", "pyarrow"), "hf"),
    "matplotlib": "report",
    "trackio": "track",
}

Verify = Annotated[
    Annotated[All, subcommand("all")]
    | Annotated[Parity, subcommand("parity")]
    | Annotated[Ledger, subcommand("ledger")],
    subcommand("verify", description="Runs the checks and prints them as a table; without a name, all of them."),
]
Data = Annotated[
    Annotated[List, subcommand("list")] | Annotated[Check, subcommand("check")] | Annotated[Make, subcommand("make")],
    subcommand("data", description="Lists data sets, looks rows over, generates rows."),
]
Command = (
    Annotated[Demo, subcommand("demo")]
    | Annotated[Train, subcommand("train")]
    | Annotated[Compress, subcommand("compress")]
    | Annotated[Generate, subcommand("generate")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Inspect, subcommand("inspect")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Export, subcommand("export")]
    | Data
    | Verify
)


def parse(args: list[str]) -> Any:
    """The command asked for. Raises `SystemExit`: 0 after help, 2 with one line for what cannot be understood."""
    args = [*args, "all"] if args == ["verify"] else args
    args = ["train", *rewritten(args[1:])] if args[:1] == ["train"] else args
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(
                Command,  # pyright: ignore[reportArgumentType]
                prog="laconic",
                description="Trains and runs language models that think, read and learn in few vectors.",
                args=args,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as end:
        if end.code:
            say(f"laconic: {one_line(told.getvalue())}")
        raise


def one_line(box: str) -> str:
    """The first sentence in a box of tyro's, with the option it takes for the nearest."""
    body = re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]  # the first line is the title
    lines = [text for line in body if (text := line.strip("│")[1:].rstrip()).strip("─-╰╯ ")]
    if not lines:
        return "cannot be understood; see laconic --help"
    near = next(
        (lines[i + 1].split()[0] for i, line in enumerate(lines[:-1]) if line.strip().startswith("Perhaps you")), None
    )
    rule = next((i for i, line in enumerate(body) if not line.strip("│─ ")), len(body))
    said = list(takewhile(lambda line: not line.startswith(" "), lines[:rule]))  # what is wrapped is not indented
    first = " ".join(said).rstrip(".")
    first += f" {lines[len(said)].strip()}" if first.endswith(":") and len(said) < len(lines) else ""
    return first + (f"; did you mean {near}?" if near else "; see laconic --help")


def end_of(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and the line to show."""
    from laconic.core.errors import LaconicError

    match error:
        case LaconicError():
            return error.code, str(error)
        case KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
        case FileNotFoundError():
            return MISSING, f"{error.filename}: not there"
        case OSError():
            return INPUT_OUTPUT, f"{error.filename or 'input/output'}: {error.strerror or error}"
        case ImportError() if error.name and error.name.partition(".")[0] in EXTRAS:
            return (
                USAGE,
                f"{error.name} is not installed; pip install 'laconic[{EXTRAS[error.name.partition('.')[0]]}]'",
            )
        case MemoryError() | RuntimeError() if isinstance(error, MemoryError) or "allocate" in str(error):
            return MEMORY, "out of memory; take a smaller --dtype, fewer or shorter prompts, or a smaller model"
        case _:
            text = f"a bug in laconic: {type(error).__name__}: {error}; LACONIC_DEBUG=1 shows where, please report it"
            return BUG, text


def main() -> None:
    """Runs one command and exits with its code; a traceback only under `LACONIC_DEBUG=1`."""
    warnings.showwarning = lambda message, *_: say(f"laconic: {message}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")  # whatever the locale says
    try:
        code = parse(sys.argv[1:]).run()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE_CLOSED
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("LACONIC_DEBUG") == "1":
            raise
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        code, text = end_of(error)
        say(f"laconic: {text}")
    sys.exit(code)


if __name__ == "__main__":
    main()
