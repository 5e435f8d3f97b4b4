"""Programs run again and again without importing torch each time: each is forked from the process of the tests.

A program gets a process, a folder and an environment of its own, and ends as it would from a shell.
"""

import contextlib
import importlib
import multiprocessing
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import torch

from tests.house.source import settings

FORKED = multiprocessing.get_context("fork")
LATE = (  # what every child would import anew
    "laconic.cli.main",
    "laconic.experiment.from_recipe.build",
    "laconic.verification.parity",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed._tools.mem_tracker",
    "rich.table",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
)


def ready() -> None:
    """Everything of `LATE` is there, for all children."""
    for name in LATE:
        importlib.import_module(name)


def laconic(command: str, inside: Path) -> subprocess.CompletedProcess[str]:
    """The exit code and the text of one `laconic ...` line, run in a process and folder of its own."""
    return forked(command, inside, main, shlex.split(command, comments=True))


def python(path: str, inside: Path) -> subprocess.CompletedProcess[str]:
    """The same of a Python program."""
    return forked(path, inside, script, [path])


def forked(name: str, inside: Path, work: Callable[[], Any], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """A process that does `work`, with `arguments` as sys.argv; 300 seconds are all it has."""
    ready()
    out, err = inside.parent / "stdout", inside.parent / "stderr"
    process = FORKED.Process(target=called, args=(work, arguments, inside, settings(inside), out, err))
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
    process.join()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(name, process.exitcode, out.read_text("utf-8"), err.read_text("utf-8"))


def main() -> None:
    """The command line, as its entry point runs it."""
    from laconic.cli.main import main

    main()


def script() -> None:
    """The program that sys.argv names, as `python PATH` runs it."""
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def called(
    work: Callable[[], Any], arguments: list[str], inside: Path, environment: dict[str, str], out: Path, err: Path
) -> None:
    """In the child: the streams to files, then the work."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    jaxtyping.config.update("jaxtyping_disable", True)  # shapes are checked where there is time for it
    os.chdir(inside)
    sys.argv = arguments
    with (
        out.open("w", encoding="utf-8") as out_file,
        err.open("w", encoding="utf-8") as err_file,
        contextlib.redirect_stdout(out_file),
        contextlib.redirect_stderr(err_file),
    ):
        os.dup2(out_file.fileno(), 1)
        os.dup2(err_file.fileno(), 2)
        work()
