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

from laconic import errors
from laconic.errors import LaconicError

JsonT = TypeVar("JsonT")
POLL_INTERVAL = timedelta(seconds=1)  # how often a rank that waits looks whether another one has failed
EXIT_GRACE_SECONDS = 1.0  # seconds until a rank that failed goes; those amid a collective learn of it when it is gone
FAILED_KEY, LEFT_KEY = "failed", "left"
ERROR_CLASSES = {
    kind.exit_code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LaconicError)
}


class RankChannel:
    """One rank's side of the conversation; every rank makes the same calls in the same order."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size, self.turn = store, rank, world_size, 0

    def all_gather(self, value: JsonT) -> list[JsonT]:
        """What every rank says, by rank. Raises what another rank failed with."""
        self.turn += 1
        self.store.set(f"{self.turn}/{self.rank}", json.dumps(value))
        found = [json.loads(self.wait_for(f"{self.turn}/{rank}")) for rank in range(self.world_size)]
        self.store.delete_key(f"{self.turn - 1}/{self.rank}")  # whoever says this turn has heard the last
        return found

    def wait_for(self, key: str) -> bytes:
        """What stands under a key, once it does. Raises what another rank failed with."""
        while True:
            try:
                self.store.wait([key], POLL_INTERVAL)
                return self.store.get(key)
            except dist.DistStoreError:
                self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raises the error that some rank ended with, if one did."""
        if self.store.check([FAILED_KEY]):
            raise error_from_json(json.loads(self.store.get(FAILED_KEY)))

    def run_on_rank_zero(self, function: Callable[[], JsonT]) -> JsonT:
        """What `function` gives on rank 0, or its error, on all."""
        said, error = None, None
        if self.rank == 0:
            try:
                said = function()
            except LaconicError as raised:
                error = raised
        told = self.all_gather({"error": error_to_json(error), "said": said})[0]
        if error or told["error"]:
            raise error or error_from_json(told["error"])
        return told["said"]

    def raise_first_error(self, error: LaconicError | None) -> None:
        """Raises the first error that any rank has, on all of them."""
        found = next((said for said in self.all_gather(error_to_json(error)) if said), None)
        if found:
            raise error if error and found == error_to_json(error) else error_from_json(found)

    @contextmanager
    def same_error_everywhere(self) -> Iterator[None]:
        """Whatever ends one rank inside ends all with the same error, and none goes before the others know it."""
        try:
            yield
        except Exception as error:
            error = self.agree_on_error(error)
            raise error

    def agree_on_error(self, error: Exception) -> Exception:
        """The error to end with: ours, or where ours is that a peer is gone, the peer's."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher sends it once the first rank has ended
        with suppress(dist.DistError):
            if isinstance(error, LaconicError):
                self.store.compare_set(FAILED_KEY, "", json.dumps(error_to_json(error)))
            else:
                error = self.find_cause(error)
            self.wait_for_peers()
        return error

    def find_cause(self, error: Exception) -> Exception:
        """What a peer said when it ended, else a bug of this rank, which the others are told."""
        if isinstance(error, RuntimeError):  # which a collective raises, if a peer is gone
            with suppress(dist.DistStoreError):
                self.store.wait([FAILED_KEY], 3 * POLL_INTERVAL)
                return error_from_json(json.loads(self.store.get(FAILED_KEY)))
        bug = {"code": LaconicError.exit_code, "message": f"rank {self.rank}: {type(error).__name__}: {error}"}
        self.store.compare_set(FAILED_KEY, "", json.dumps(bug))
        return error

    def wait_for_peers(self) -> None:
        """Waits a little until every rank is about to end; a launcher stops the rest as soon as one has."""
        end = time.monotonic() + EXIT_GRACE_SECONDS
        self.store.add(LEFT_KEY, 1)
        while self.store.add(LEFT_KEY, 0) < self.world_size and time.monotonic() < end:
            time.sleep(0.02)


def error_to_json(error: LaconicError | None) -> dict[str, object] | None:
    """An error as JSON holds it."""
    return error and {"code": error.exit_code, "message": str(error)}


def error_from_json(report: dict[str, object]) -> LaconicError:
    """The error of another rank, of the same class and code."""
    return ERROR_CLASSES.get(int(str(report["code"])), LaconicError)(str(report["message"]))
