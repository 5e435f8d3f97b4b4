"""Ranks as torchrun starts them, forked from the process of the tests, so that torch is imported once."""

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

PATIENCE = 60.0  # seconds until ranks that hang are killed
Work = Callable[[], Any]


class End(NamedTuple):
    """How a rank ended: exit code, the message of its error, and what its work gave."""

    code: int
    message: str
    said: Any


def ends(folder: Path, work: Work, world: int = 2) -> list[End]:
    """`work` on every rank, each in a process of its own with the environment of torchrun, which keeps the store."""
    ready()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE))
    about = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    fork, paths = multiprocessing.get_context("fork"), [folder / f"end-{rank}.json" for rank in range(world)]
    about["WORLD_SIZE"] = str(world)
    names = [about | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    children = [fork.Process(target=one, args=it) for it in zip([work] * world, paths, names, strict=True)]
    starter = Thread(target=lambda: [child.start() for child in children])  # torch walks the stack: 50 calls less
    starter.start()
    starter.join()
    until = time.monotonic() + PATIENCE
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
    found = [json.loads(path.read_text()) if path.exists() else ["killed", None] for path in paths]
    for path in paths:
        path.unlink(missing_ok=True)
    return [End(child.exitcode or 0, *said) for child, said in zip(children, found, strict=True)]


def one(work: Work, path: Path, environment: Mapping[str, str]) -> None:
    """The life of a rank; its exit code is that of the command line."""
    os.environ.update(environment)
    torch.set_num_threads(1)
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


def well(folder: Path, work: Work, world: int = 2) -> list[Any]:
    """What every rank's work gave, all of them having ended well."""
    found = ends(folder, work, world)
    assert [end.code for end in found] == [0] * world, found
    return [end.said for end in found]
