"""Services that the routes share, strict request bodies, and answers that stop when the client disconnects."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from laconic.errors import InputError, translate_os_errors
from laconic.serving.engine import Engine
from laconic.serving.http.api_error import ApiError, build_disconnect_error, build_error_body, to_http_error
from laconic.serving.http.api_model import ApiModel
from laconic.serving.http.limits import Deadline
from laconic.serving.http.memory_store import MemoryStore
from laconic.serving.http.metrics import ServerMetrics
from laconic.serving.http.prompts import Prefix
from laconic.serving.http.schemas import GenerationRequest
from laconic.serving.http.sequences import SequenceGroup
from laconic.serving.http.session_store import SessionStore
from laconic.serving.http.worker import Worker, run_in_thread
from laconic.storage.strict_json import parse_json, to_canonical_json

T = TypeVar("T")


@dataclass(frozen=True)
class Services:
    """Model, engine and stores, which all routes of a server use."""

    served: ApiModel
    engine: Engine
    memories: MemoryStore
    sessions: SessionStore
    metrics: ServerMetrics
    worker: Worker
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for another name than that of the served model; None names that model."""
        if name not in (None, self.served.name):
            message = f"model: {name[:80]!r} is not served; this server has {self.served.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    async def resolve_prefix(self, body: GenerationRequest) -> Prefix:
        """Return the memory or state that a request's prompt continues. Raises the errors of the stores."""
        self.check_model(body.model)
        if body.memories and body.session is not None:
            raise ApiError(400, "memory and session given; give one of them", "session")
        if body.session is not None:
            return self.sessions.get(body.session).state
        return await run_in_thread(self.memories.load_prefix, body.memories) if body.memories else None


def get_services(request: Request) -> Services:
    return cast(Services, request.app.state.services)


ServicesDependency = Annotated[Services, Depends(get_services)]


def get_deadline(request: Request) -> Deadline:
    return cast(Deadline, request.state.deadline)


async def open_group(request: Request, services: ServicesDependency) -> AsyncIterator[SequenceGroup]:
    """Yield a group of sequences, and cancel it after the response, however that ended."""
    group = SequenceGroup(services.engine, services.metrics, get_deadline(request))
    try:
        yield group
    finally:
        group.close()


GroupDependency = Annotated[SequenceGroup, Depends(open_group)]


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for a result; if the client disconnects, cancel the work and raise ApiError (499)."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise build_disconnect_error()
    finally:
        watcher.cancel()
        task.cancel()


async def save_body(request: Request, path: Path) -> None:
    """Write the body of a request to a file. Raises DiskError if the disk is full."""
    with translate_os_errors(path), path.open("wb") as file:
        async for chunk in request.stream():
            await run_in_threadpool(file.write, chunk)


def stream_chunks(chunks: AsyncIterator[dict[str, Any]], request: Request) -> EventSourceResponse:
    """Return an answer that is sent in chunks, with a final `[DONE]`; an error is the last event."""

    async def write_events() -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
            yield "[DONE]"
        except Exception as error:  # the status has been sent, so that the error can only be an event
            yield to_canonical_json(build_error_body(to_http_error(error, request.state.id)))

    return EventSourceResponse(write_events(), sep="\n")


class StrictRequest(Request):
    """A request from an untrusted source: no NaN, repeated keys, unpaired surrogates or deep nesting in its body."""

    async def json(self) -> dict[str, Any]:
        """Return the body. Raises ApiError (400) if it is not a JSON object."""
        try:
            return await run_in_thread(parse_json, await self.body(), "body")
        except InputError as error:
            raise ApiError(400, str(error)) from None


class StrictRoute(APIRoute):
    """A route that parses bodies as `StrictRequest` does; FastAPI asks for a class per route."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly
