"""`laconic` run again and again without importing torch each time: every call is forked from one process that has."""

import contextlib
import multiprocessing
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.house.source import settings

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["laconic.cli", "laconic.recipe.build", "laconic.verify.parity", "torch._dynamo"])


def laconic(command: str, inside: Path) -> subprocess.CompletedProcess[str]:
    """The exit code and the text of one `laconic ...` line, run in a process and folder of its own."""
    out, err = inside.parent / "stdout", inside.parent / "stderr"
    process = FORKED.Process(
        target=called, args=(shlex.split(command, comments=True), inside, settings(inside), out, err)
    )
    process.start()
    process.join(300)
    if process.exitcode is None:
        process.kill()
    process.join()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(command, process.exitcode, out.read_text("utf-8"), err.read_text("utf-8"))


def called(arguments: list[str], inside: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    """In the child: the streams to files, then the command line as its entry point runs it."""
    import torch

    from laconic.cli import main

    os.environ.update(environment)
    torch.set_num_threads(1)
    os.chdir(inside)
    sys.argv = arguments
    with (
        out.open("w", encoding="utf-8") as told,
        err.open("w", encoding="utf-8") as said,
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(said),
    ):
        os.dup2(told.fileno(), 1)
        os.dup2(said.fileno(), 2)
        main()
