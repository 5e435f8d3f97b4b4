"""Command-line entry point: parse the arguments, run the command, and exit with a documented code."""

import contextlib
import inspect
import io
import operator
import os
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import subcommand

import laconic
from laconic import __version__
from laconic.cli.arguments import check_utf8
from laconic.cli.commands.audit import AuditCommand
from laconic.cli.commands.chat import ChatCommand
from laconic.cli.commands.compress import CompressCommand
from laconic.cli.commands.data import DataCheckCommand, DataListCommand
from laconic.cli.commands.demo import DemoCommand
from laconic.cli.commands.demo_read import DemoReadCommand
from laconic.cli.commands.evaluate import EvaluateCommand
from laconic.cli.commands.export import ExportCommand
from laconic.cli.commands.generate import GenerateCommand
from laconic.cli.commands.import_model import ImportCommand
from laconic.cli.commands.inspect import InspectCommand
from laconic.cli.commands.recipes import RecipesKeysCommand, RecipesListCommand, RecipesShowCommand
from laconic.cli.commands.report import ReportCommand
from laconic.cli.commands.serve import ServeCommand
from laconic.cli.commands.tasks import TasksListCommand
from laconic.cli.commands.train import TrainCommand, normalise_args
from laconic.cli.commands.verify import VerifyAllCommand, VerifyParityCommand
from laconic.cli.commands.version import VersionCommand
from laconic.cli.data_make import DataMakeCommand
from laconic.cli.threads import apply_cpu_quota, limit_spinning
from laconic.cli.usage_errors import summarise_usage_error
from laconic.console import log_message, open_missing_streams
from laconic.errors import DiskError, InputError, LaconicError, OutOfMemoryError, UsageError, is_out_of_memory

EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
MIN_COLUMNS = 20  # help for a narrower terminal would never end
EXTRA_OF_PACKAGE = {
    **dict.fromkeys(("transformers", "peft", "datasets", "pyarrow"), "hf"),
    "matplotlib": "report",
    **dict.fromkeys(("fastapi", "uvicorn", "sse_starlette", "prometheus_client"), "serve"),
    "trackio": "track",
    **{name: name for name in ("wandb", "tensorboard", "gguf")},
    "lm_eval": "eval",
}

# Every command by its name; of subcommands, the first may be left out.
COMMANDS: dict[str, Any] = {
    "demo": {"think": DemoCommand, "read": DemoReadCommand},
    "train": TrainCommand,
    "recipes": {"list": RecipesListCommand, "show": RecipesShowCommand, "keys": RecipesKeysCommand},
    "compress": CompressCommand,
    "generate": GenerateCommand,
    "chat": ChatCommand,
    "serve": ServeCommand,
    "evaluate": EvaluateCommand,
    "inspect": InspectCommand,
    "audit": AuditCommand,
    "report": ReportCommand,
    "export": ExportCommand,
    "import": ImportCommand,
    "data": {"list": DataListCommand, "check": DataCheckCommand, "make": DataMakeCommand},
    "tasks": TasksListCommand,
    "verify": {"all": VerifyAllCommand, "parity": VerifyParityCommand},
    "version": VersionCommand,
}
DESCRIPTIONS = {  # of commands with subcommands
    "demo": "Show latent thoughts (think) or a memory of a chapter (read); laconic demo --fast is demo think --fast.",
    "recipes": "List or print the recipes of laconic train, or explain their keys.",
    "data": "List, check or generate data sets.",
    "verify": "Compare models with a reference; laconic verify alone runs verify all.",
}


def parse_command(args: list[str]) -> Any:
    """Parse the arguments into a command. Exits after `--help`, and with 2 and one line if they cannot be parsed."""
    for argument in args:
        check_utf8(argument)
    if args == ["--version"]:
        print(__version__)
        sys.exit(0)
    if not args:  # as git does, the list of commands; as of other incomplete commands, the exit code is 2
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
            parse_command(["--help"])
        sys.exit(UsageError.exit_code)
    check_command_name(args)
    args = insert_default_subcommand(args)
    args = ["tasks", *args[2:]] if args[:2] == ["tasks", "list"] else args
    args = ["train", *normalise_args(args[1:])] if args[:1] == ["train"] else args
    if shutil.get_terminal_size().columns < MIN_COLUMNS:
        os.environ["COLUMNS"] = str(MIN_COLUMNS)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                select_command(args),
                prog="laconic",
                description="Language models that reason, read and learn with a few vectors instead of many tokens. "
                "laconic COMMAND --help describes a command, with examples.",
                args=args,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as end:
        if end.code:
            command = ["laconic", *(name for name in args[:1] if name in COMMANDS)]
            command += [name for name in args[1:2] if name in list_subcommands(args)]
            log_message(f"laconic: {summarise_usage_error(errors.getvalue(), ' '.join(command))}")
        raise


def select_command(args: list[str]) -> Any:
    """Return the type to parse: the list of commands, or that of `args` and `version`, since tyro needs two.

    So tyro does not suggest options of other commands.
    """
    if args[0] not in COMMANDS or args[0] == "version":
        return reduce(operator.or_, (build_type(key) if key == args[0] else build_list_entry(key) for key in COMMANDS))
    return build_type(args[0]) | build_type("version")


def build_type(name: str) -> Any:
    command = COMMANDS[name]
    if not isinstance(command, dict):
        return Annotated[command, subcommand(name)]
    kinds = reduce(operator.or_, (Annotated[kind, subcommand(key)] for key, kind in command.items()))
    default = next(iter(command.values()))()
    return Annotated[kinds, subcommand(name, description=DESCRIPTIONS[name], default=default)]


def build_list_entry(name: str) -> Any:
    """Return a command with the first paragraph of its help, for the list of `laconic --help`."""
    text = DESCRIPTIONS.get(name) or inspect.cleandoc(COMMANDS[name].__doc__)
    return Annotated[VersionCommand, subcommand(name, description=" ".join(text.partition("\n\n")[0].split()))]


def list_subcommands(args: list[str]) -> list[str]:
    command = COMMANDS.get(args[0]) if args else None
    return list(command) if isinstance(command, dict) else []


def insert_default_subcommand(args: list[str]) -> list[str]:
    """Return the arguments with the subcommand that `laconic data --format json` leaves out."""
    names = list_subcommands(args)
    follows = args[1:2]
    if not names or follows in (["--help"], ["-h"]) or (follows and not follows[0].startswith("-")):
        return args
    return [args[0], names[0], *args[1:]]


def check_command_name(args: list[str]) -> None:
    """Exit with one line on standard error if there is no such command or subcommand."""
    for i, names in enumerate((list(COMMANDS), list_subcommands(args))):
        if not names or i >= len(args) or args[i].startswith("-") or args[i] in names:
            continue
        close = [name for name in names if name.startswith(args[i])] or get_close_matches(args[i], names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"give one of {', '.join(names)}"
        log_message(f"laconic: no command {' '.join(args[: i + 1])}; {hint}")
        sys.exit(UsageError.exit_code)


def exit_status(error: BaseException) -> tuple[int, str]:
    match error:
        case LaconicError():
            return error.exit_code, str(error)
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED, "interrupted"
        case FileNotFoundError():
            return InputError.exit_code, f"{error.filename}: no such file" if error.filename else str(error)
        case OSError():
            return DiskError.exit_code, f"{error.filename or 'input/output'}: {error.strerror or error}"
        case ImportError() if error.name and error.name.partition(".")[0] in EXTRA_OF_PACKAGE:
            extra = EXTRA_OF_PACKAGE[error.name.partition(".")[0]]
            return (
                UsageError.exit_code,
                f"{error.name} is not installed; in a clone of laconic: pip install '.[{extra}]'",
            )
        case _ if is_out_of_memory(error):
            advice = "out of memory; try a smaller --dtype, a smaller batch, or a smaller model"
            return OutOfMemoryError.exit_code, advice
        case _:
            text = f"{type(error).__name__}: {error}"
            if place := find_user_code(error):
                text = " ".join(text.split())
                text = f"{place}: {text}; this line is in your code; LACONIC_DEBUG=1 prints the traceback"
            else:
                text = f"internal error: {text}; please report it with the traceback that LACONIC_DEBUG=1 prints"
            return LaconicError.exit_code, text


def find_user_code(error: BaseException) -> str | None:
    """Return file and line of the innermost frame that is neither of laconic nor Python nor an installed package."""
    roots = [str(Path(str(module.__file__)).parent) + os.sep for module in (laconic, os)]
    packages = ("site-packages", "dist-packages", "torchinductor_", ".triton")  # the last two hold generated code
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        if not file.startswith(("<", *roots)) and not any(f"{os.sep}{name}" in file for name in packages):
            return f"{file}:{frame.lineno}"
    return None


def main() -> None:
    if sys.getfilesystemencoding() != "utf-8":  # a locale with another encoding, in which é would not be found
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    run_and_exit(lambda: parse_command(sys.argv[1:]).run())


def main_lm_eval() -> None:
    """Run lm-eval's command line with the model `laconic` registered: the command `laconic-lm-eval`."""

    def run() -> None:
        from laconic.evaluation.lm_eval_model import run_lm_eval

        run_lm_eval()

    run_and_exit(run)


@contextlib.contextmanager
def exit_at_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `SystemExit`, so that half-written files are removed, unless they are ignored."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    names = [name for name in ("SIGTERM", "SIGHUP") if is_main and hasattr(signal, name)]  # Windows has no SIGHUP
    numbers = [n for n in (getattr(signal, name) for name in names) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def run_and_exit(run: Callable[[], int | None]) -> NoReturn:
    """Exit with the code that a function returns, or that of its error; tracebacks only with `LACONIC_DEBUG=1`."""
    open_missing_streams()
    warnings.showwarning = lambda message, *_: log_message(f"laconic: {message}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")  # whatever the locale is
    apply_cpu_quota()
    limit_spinning()
    try:
        with exit_at_signals():
            code = run()
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
