"""Options of the server, and when a request ends. One that exceeds a limit is refused with a 4xx status."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from laconic.serving.http.api_error import ApiError, build_shutdown_error


@dataclass(frozen=True)
class ServerOptions:
    """Who may send requests, and what these may use, as the flags of `laconic serve` say.

    An origin "*" allows all, and memories are lost at the end without a `memory_folder`.
    """

    api_key: str | None = None
    allowed_origins: Sequence[str] = ()
    log_requests: bool = False
    shutdown_seconds: float = 30.0
    memory_folder: Path | None = None
    memory_files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    max_body_bytes: int = 8 * 2**20
    max_memory_bytes: int = 512 * 2**20
    max_prompt_tokens: int | None = None  # of a prompt; None: the context
    max_generated_tokens: int | None = None  # of a sequence; None: what fits into the context
    max_batch_size: int = 16  # sequences that are decoded together
    max_queue: int = 64  # sequences that wait, and those of one request
    max_seconds: float = 600.0
    prefix_cache_bytes: int = 2**30  # of earlier prompts, for later ones that begin with them
    max_memories: int = 256
    max_sessions: int = 64


class Deadline:
    """The time of the event loop at which a request ends; it may move forward while the request waits."""

    def __init__(self, time: float) -> None:
        self.time = time
        self.is_shutdown = False  # whether the request ends because the server does
        self.timeouts = set[asyncio.Timeout]()  # timeouts of the blocks that run in `limit`

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancel the block at the deadline, or after a timeout of its own, and raise ApiError: 408, 503 at shutdown."""
        timeout = asyncio.timeout_at(self.time)
        self.timeouts.add(timeout)
        try:
            async with timeout:
                yield
        except TimeoutError:
            message = "the request took too long; send all of it at once, shorten it, or raise --max-seconds"
            raise build_shutdown_error() if self.is_shutdown else ApiError(408, message) from None
        finally:
            self.timeouts.discard(timeout)

    def shorten(self, time: float) -> None:
        """End the request at an earlier time, because the server shuts down."""
        if time < self.time:
            self.time, self.is_shutdown = time, True
            for timeout in self.timeouts:
                if not timeout.expired():  # one that has just expired cannot be changed
                    timeout.reschedule(time)


class Deadlines:
    """The deadlines of all open requests; only the event loop may call the methods."""

    def __init__(self, max_seconds: float) -> None:
        self.max_seconds = max_seconds
        self.open_deadlines = set[Deadline]()
        self.shutdown_time: float | None = None

    @contextmanager
    def open(self) -> Iterator[Deadline]:
        """Yield the deadline of a request that begins now and ends with the block."""
        deadline = Deadline(asyncio.get_running_loop().time() + self.max_seconds)
        if self.shutdown_time is not None:
            deadline.shorten(self.shutdown_time)
        self.open_deadlines.add(deadline)
        try:
            yield deadline
        finally:
            self.open_deadlines.discard(deadline)

    def shut_down(self, seconds: float) -> None:
        """End all requests after at most as many seconds."""
        self.shutdown_time = asyncio.get_running_loop().time() + seconds
        for deadline in self.open_deadlines:
            deadline.shorten(self.shutdown_time)
