"""Exchange values between ranks, and end all ranks with the error of any of them.

Errors go through torchrun's store, which still answers when a collective is broken because a peer has ended.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from laconic import errors
from laconic.errors import LaconicError

JsonT = TypeVar("JsonT")
ERROR_TIMEOUT = timedelta(seconds=3)  # for the error of a peer that ended in the middle of a collective
EXIT_GRACE_SECONDS = 1.0
FAILED_KEY, EXITING_KEY = "failed", "exiting"
ERROR_CLASSES = {
    kind.exit_code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, LaconicError)
}


class RankChannel:
    """One rank's connection to the others; all ranks make the same calls in the same order."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size

    def all_gather(self, value: JsonT) -> list[JsonT]:
        """Return the value of every rank, in order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def run_on_rank_zero(self, function: Callable[[], JsonT]) -> JsonT:
        """Call a function on rank 0 and return its result, or raise its error, on all ranks."""
        result: Any = None
        error: LaconicError | None = None
        if self.rank == 0:
            try:
                result = function()
            except LaconicError as raised:
                error = raised
        message: list[Any] = [(error_to_json(error), result)]
        dist.broadcast_object_list(message, src=0)
        report, result = message[0]
        if report:
            raise error or error_from_json(report)
        return result

    def raise_first_error(self, error: LaconicError | None) -> None:
        """Raise the first error that any rank has, on all ranks."""
        first = next((report for report in self.all_gather(error_to_json(error)) if report), None)
        if first:
            raise error if error and first == error_to_json(error) else error_from_json(first)

    @contextmanager
    def same_error_everywhere(self) -> Iterator[None]:
        """End all ranks with the same error, whichever rank raises it inside this context."""
        try:
            yield
        except Exception as error:
            error = self.agree_on_error(error)
            raise error

    def agree_on_error(self, error: Exception) -> Exception:
        """Publish this rank's error and return it, or return that of the peer that caused it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it once the first rank has ended
        with suppress(dist.DistError):
            if isinstance(error, LaconicError):
                self.store.compare_set(FAILED_KEY, "", json.dumps(error_to_json(error)))
            else:
                error = self.find_cause(error)
            self.wait_for_peers()
        return error

    def find_cause(self, error: Exception) -> Exception:
        """Return the error that a peer ended with; if there is none, publish this one as a bug and return it."""
        if isinstance(error, RuntimeError):  # raised by a collective if a peer has ended
            with suppress(dist.DistStoreError):
                self.store.wait([FAILED_KEY], ERROR_TIMEOUT)
                return error_from_json(json.loads(self.store.get(FAILED_KEY)))
        bug = {"code": LaconicError.exit_code, "message": f"rank {self.rank}: {type(error).__name__}: {error}"}
        self.store.compare_set(FAILED_KEY, "", json.dumps(bug))
        return error

    def wait_for_peers(self) -> None:
        """Wait a little until every rank is about to end; torchrun stops the others as soon as one has."""
        deadline = time.monotonic() + EXIT_GRACE_SECONDS
        self.store.add(EXITING_KEY, 1)
        while self.store.add(EXITING_KEY, 0) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.02)


def error_to_json(error: LaconicError | None) -> dict[str, object] | None:
    return error and {"code": error.exit_code, "message": str(error)}


def error_from_json(report: dict[str, object]) -> LaconicError:
    """Return an error of the class that has this exit code."""
    return ERROR_CLASSES.get(int(str(report["code"])), LaconicError)(str(report["message"]))
