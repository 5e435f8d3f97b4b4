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

from laconic.cli.compress import CompressCommand
from laconic.cli.data import DataCheckCommand, DataListCommand
from laconic.cli.data_make import DataMakeCommand
from laconic.cli.demo import DemoCommand
from laconic.cli.evaluate import EvaluateCommand
from laconic.cli.export import ExportCommand
from laconic.cli.generate import GenerateCommand
from laconic.cli.inspect import InspectCommand
from laconic.cli.report import ReportCommand
from laconic.cli.train import TrainCommand, normalise_args
from laconic.cli.verify import Ledger, VerifyAllCommand, VerifyParityCommand
from laconic.console import log_message

EXIT_USAGE, EXIT_MISSING_INPUT, EXIT_BUG, EXIT_OUT_OF_MEMORY, EXIT_IO_ERROR, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED = (
    2,
    66,
    70,
    71,
    74,
    130,
    141,
)
EXTRA_OF_PACKAGE = {
    **dict.fromkeys(("transformers", "peft", "datasets", "pyarrow"), "hf"),
    "matplotlib": "report",
    "trackio": "track",
}

VerifyGroup = Annotated[
    Annotated[VerifyAllCommand, subcommand("all")]
    | Annotated[VerifyParityCommand, subcommand("parity")]
    | Annotated[Ledger, subcommand("ledger")],
    subcommand("verify", description="Runs the checks and prints them as a table; without a name, all of them."),
]
DataGroup = Annotated[
    Annotated[DataListCommand, subcommand("list")]
    | Annotated[DataCheckCommand, subcommand("check")]
    | Annotated[DataMakeCommand, subcommand("make")],
    subcommand("data", description="Lists data sets, looks rows over, generates rows."),
]
Command = (
    Annotated[DemoCommand, subcommand("demo")]
    | Annotated[TrainCommand, subcommand("train")]
    | Annotated[CompressCommand, subcommand("compress")]
    | Annotated[GenerateCommand, subcommand("generate")]
    | Annotated[EvaluateCommand, subcommand("evaluate")]
    | Annotated[InspectCommand, subcommand("inspect")]
    | Annotated[ReportCommand, subcommand("report")]
    | Annotated[ExportCommand, subcommand("export")]
    | DataGroup
    | VerifyGroup
)


def parse_command(args: list[str]) -> Any:
    """The command asked for. Raises `SystemExit`: 0 after help, 2 with one line for what cannot be understood."""
    args = [*args, "all"] if args == ["verify"] else args
    args = ["train", *normalise_args(args[1:])] if args[:1] == ["train"] else args
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
            log_message(f"laconic: {summarise_usage_error(told.getvalue())}")
        raise


def summarise_usage_error(box: str) -> str:
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


def exit_status(error: BaseException) -> tuple[int, str]:
    """The exit code of an error, and the line to show."""
    from laconic.errors import LaconicError

    match error:
        case LaconicError():
            return error.exit_code, str(error)
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED, "interrupted"
        case FileNotFoundError():
            return EXIT_MISSING_INPUT, f"{error.filename}: not there"
        case OSError():
            return EXIT_IO_ERROR, f"{error.filename or 'input/output'}: {error.strerror or error}"
        case ImportError() if error.name and error.name.partition(".")[0] in EXTRA_OF_PACKAGE:
            return (
                EXIT_USAGE,
                f"{error.name} is not installed; pip install 'laconic[{EXTRA_OF_PACKAGE[error.name.partition('.')[0]]}]'",
            )
        case MemoryError() | RuntimeError() if isinstance(error, MemoryError) or "allocate" in str(error):
            return (
                EXIT_OUT_OF_MEMORY,
                "out of memory; take a smaller --dtype, fewer or shorter prompts, or a smaller model",
            )
        case _:
            text = f"a bug in laconic: {type(error).__name__}: {error}; LACONIC_DEBUG=1 shows where, please report it"
            return EXIT_BUG, text


def main() -> None:
    """Runs one command and exits with its code; a traceback only under `LACONIC_DEBUG=1`."""
    warnings.showwarning = lambda message, *_: log_message(f"laconic: {message}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")  # whatever the locale says
    try:
        code = parse_command(sys.argv[1:]).run()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_PIPE_CLOSED
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("LACONIC_DEBUG") == "1":
            raise
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        code, text = exit_status(error)
        log_message(f"laconic: {text}")
    sys.exit(code)


if __name__ == "__main__":
    main()
