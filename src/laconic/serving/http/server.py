"""Run the server: load the model, serve until a signal, and finish what runs."""

import asyncio
import math
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus

from laconic.console import log_message, pluralize, status
from laconic.errors import translate_os_errors
from laconic.experiment.load_model import LoadedModel
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.app import build_app
from laconic.serving.http.limits import Deadlines, ServerOptions
from laconic.serving.http.worker import start_thread
from laconic.serving.listener import format_address
from laconic.storage.lock import lock_folder

SEND_SECONDS = 5  # time at shutdown to send the answers of the requests that it ends
KEEP_ALIVE_SECONDS = 75  # longer than clients and proxies keep idle connections


class GracefulServer(uvicorn.Server):
    """uvicorn's server, which ends open requests by their deadlines, so that clients get an answer.

    After a signal, requests may go on for `shutdown_seconds`. Then a text that has begun ends with `finish_reason`
    "length", anything else with status 503.
    """

    def __init__(self, config: uvicorn.Config, deadlines: Deadlines, shutdown_seconds: float) -> None:
        super().__init__(config)
        self.deadlines = deadlines
        self.shutdown_seconds = shutdown_seconds
        self.loop: asyncio.AbstractEventLoop | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadlines.shut_down(self.shutdown_seconds)
        if num_open := len(self.deadlines.open_deadlines):
            wait = f"{self.shutdown_seconds:g} s at most"
            log_message(f"laconic: finishing {pluralize(num_open, 'request')}, {wait}; Ctrl-C again ends them now")
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown; a second Ctrl-C ends open requests, where uvicorn would cancel its tasks."""
        if not self.should_exit:
            super().handle_exit(sig, frame)
        elif sig == signal.SIGINT and self.loop is not None:
            self.loop.call_soon_threadsafe(self.deadlines.shut_down, 0.0)


def serve(name: str, load: Callable[[], LoadedModel], options: ServerOptions, listener: socket.socket) -> None:
    """Serve a model under a name on a bound address until SIGTERM or SIGINT, then finish what runs.

    Raises:
        BusyError: If another server has the memory folder.
        LaconicError: What `load` raises.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # uvicorn raises the signal again at its end
    AppStatus.disable_automatic_graceful_drain()  # streams end when they are complete, or at their deadline
    with ExitStack() as stack:
        if (memory_folder := options.memory_folder) is not None:
            with translate_os_errors(memory_folder):
                memory_folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_folder(memory_folder))

        def build() -> tuple[ApiModel, FastAPI]:
            served = ApiModel(name, load(), options)
            return served, build_app(served)

        with status(f"loading {name}"):
            served, app = start_thread(build).result()
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(options.shutdown_seconds) + SEND_SECONDS,
        )
        log_message(f"laconic: serving {served.name} at {format_address(listener)}; Ctrl-C ends")
        GracefulServer(config, app.state.deadlines, options.shutdown_seconds).run(sockets=[listener])
