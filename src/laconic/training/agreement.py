"""What ranks say to one another in JSON, over torchrun's store; an error on one of them is the error of all.

The store is apart from the collectives, so that it still answers when one of these is broken.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from laconic.core import errors
from laconic.core.errors import LaconicError

Said = TypeVar("Said")
LOOK = timedelta(seconds=1)  # how often a rank that waits looks whether another one has failed
LEAVING = 1.0  # seconds until a rank that failed goes; those amid a collective learn of it when it is gone
FAILED, LEFT = "failed", "left"
KINDS = {kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LaconicError)}


class Talk:
    """One rank's side of the conversation; every rank makes the same calls in the same order."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world, self.turn = store, rank, world, 0

    def exchange(self, value: Said) -> list[Said]:
        """What every rank says, by rank. Raises what another rank failed with."""
        self.turn += 1
        self.store.set(f"{self.turn}/{self.rank}", json.dumps(value))
        found = [json.loads(self.hear(f"{self.turn}/{rank}")) for rank in range(self.world)]
        self.store.delete_key(f"{self.turn - 1}/{self.rank}")  # whoever says this turn has heard the last
        return found

    def hear(self, key: str) -> bytes:
        """What stands under a key, once it does. Raises what another rank failed with."""
        while True:
            try:
                self.store.wait([key], LOOK)
                return self.store.get(key)
            except dist.DistStoreError:
                self.ask_failed()

    def ask_failed(self) -> None:
        """Raises the error that some rank ended with, if one did."""
        if self.store.check([FAILED]):
            raise error_of(json.loads(self.store.get(FAILED)))

    def first(self, function: Callable[[], Said]) -> Said:
        """What `function` gives on rank 0, or its error, on all."""
        said, error = None, None
        if self.rank == 0:
            try:
                said = function()
            except LaconicError as raised:
                error = raised
        told = self.exchange({"error": report(error), "said": said})[0]
        if error or told["error"]:
            raise error or error_of(told["error"])
        return told["said"]

    def ask_all(self, error: LaconicError | None) -> None:
        """Raises the first error that any rank has, on all of them."""
        found = next((said for said in self.exchange(report(error)) if said), None)
        if found:
            raise error if error and found == report(error) else error_of(found)

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Whatever ends one rank inside ends all with the same error, and none goes before the others know it."""
        try:
            yield
        except Exception as error:
            error = self.agreed(error)
            raise error

    def agreed(self, error: Exception) -> Exception:
        """The error to end with: ours, or where ours is that a peer is gone, the peer's."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher sends it once the first rank has ended
        with suppress(dist.DistError):
            if isinstance(error, LaconicError):
                self.store.compare_set(FAILED, "", json.dumps(report(error)))
            else:
                error = self.cause(error)
            self.leave()
        return error

    def cause(self, error: Exception) -> Exception:
        """What a peer said when it ended, else a bug of this rank, which the others are told."""
        if isinstance(error, RuntimeError):  # which a collective raises, if a peer is gone
            with suppress(dist.DistStoreError):
                self.store.wait([FAILED], 3 * LOOK)
                return error_of(json.loads(self.store.get(FAILED)))
        bug = {"code": LaconicError.code, "message": f"rank {self.rank}: {type(error).__name__}: {error}"}
        self.store.compare_set(FAILED, "", json.dumps(bug))
        return error

    def leave(self) -> None:
        """Waits a little until every rank is about to end; a launcher stops the rest as soon as one has."""
        end = time.monotonic() + LEAVING
        self.store.add(LEFT, 1)
        while self.store.add(LEFT, 0) < self.world and time.monotonic() < end:
            time.sleep(0.02)


def report(error: LaconicError | None) -> dict[str, object] | None:
    """An error as JSON holds it."""
    return error and {"code": error.code, "message": str(error)}


def error_of(said: dict[str, object]) -> LaconicError:
    """The error of another rank, of the same class and code."""
    return KINDS.get(int(str(said["code"])), LaconicError)(str(said["message"]))
