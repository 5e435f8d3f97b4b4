"""Run ranks as torchrun starts them, forked from the test process, so that torch is imported once."""

import faulthandler
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import jaxtyping
import torch
from torch.distributed import TCPStore

from laconic.errors import LaconicError
from tests.house.warm import ready

TIMEOUT = 240.0  # seconds until hanging ranks are killed
Work = Callable[[], Any]


class RankResult(NamedTuple):
    """Exit code of a rank, the message of its error, and the result of its work."""

    code: int
    message: str
    result: Any


def run_ranks(folder: Path, work: Work, world: int = 2) -> list[RankResult]:
    """Run `work` on every rank, each in its own process with torchrun's environment; this process hosts the store."""
    ready()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT))
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    fork, paths = multiprocessing.get_context("fork"), [folder / f"end-{rank}.json" for rank in range(world)]
    environment["WORLD_SIZE"] = str(world)
    environments = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    children = [
        fork.Process(target=run_rank, args=args) for args in zip([work] * world, paths, environments, strict=True)
    ]
    starter = Thread(target=lambda: [child.start() for child in children])  # torch walks the stack: 50 calls less
    starter.start()
    starter.join()
    deadline = time.monotonic() + TIMEOUT
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
    ends = [json.loads(path.read_text()) if path.exists() else ["killed", None] for path in paths]
    for path in paths:
        path.unlink(missing_ok=True)
    return [RankResult(child.exitcode or 0, *end) for child, end in zip(children, ends, strict=True)]


def run_rank(work: Work, path: Path, environment: Mapping[str, str]) -> None:
    """Run a rank and end its process with the exit code of the command line."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.9 * TIMEOUT, file=2)  # where a rank hangs, before it is killed
    jaxtyping.config.update("jaxtyping_disable", True)  # shapes are checked where there is time for it
    code = 0
    try:
        end = ["", work()]
    except LaconicError as error:
        code, end = error.exit_code, [str(error), None]
    except Exception as error:
        code, end = LaconicError.exit_code, [repr(error), None]
    path.write_text(json.dumps(end))
    os._exit(code)


def run_ranks_ok(folder: Path, work: Work, world: int = 2) -> list[Any]:
    """Return the result of every rank; all must exit with 0."""
    ends = run_ranks(folder, work, world)
    assert [end.code for end in ends] == [0] * world, ends
    return [end.result for end in ends]
