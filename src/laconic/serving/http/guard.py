"""ASGI middleware in front of every route: API key, host, body size, time limit, request ids, counts, and errors."""

import asyncio
import hmac
import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from laconic.console import log_message
from laconic.serving.http.api_error import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    build_disconnect_error,
    build_error_response,
    to_http_error,
)
from laconic.serving.http.limits import Deadline, Deadlines, ServerOptions
from laconic.serving.http.metrics import ServerMetrics
from laconic.serving.listener import is_local_host

OPEN_ROUTES = ("/health",)
UNKNOWN_ROUTE = "unknown"
BODY_SECONDS = 30.0  # time limit until the next piece of a body arrives
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)  # of a client

OpenBodies = dict["LimitedBody", asyncio.Timeout]  # in the order in which they began to wait


@dataclass(frozen=True)
class RequestGuard:
    """Check requests before they reach the routes, and turn errors that the routes do not catch into answers.

    Without a key, the headers Host and Origin must name this machine instead, so that no web page can reach the server,
    not even by DNS rebinding, except from the allowed origins.
    """

    app: ASGIApp
    options: ServerOptions
    deadlines: Deadlines
    metrics: ServerMetrics
    open_bodies: "OpenBodies" = field(default_factory=lambda: OpenBodies())  # whose next piece has not arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; connections other than HTTP are passed on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET, but the server sends only the headers
            scope = {**scope, "method": "GET"}
        with self.deadlines.open() as deadline:
            await self.handle(scope, receive, send, deadline)

    async def handle(self, scope: Scope, receive: Receive, send: Send, deadline: Deadline) -> None:
        start = time.perf_counter()
        options = self.options
        headers = Headers(scope=scope)
        status = 0
        is_complete = False
        given_id = headers.get("x-request-id", "")
        request_id = given_id if REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        # files of memories and states come by PUT, everything else is JSON
        max_bytes = options.max_memory_bytes if scope["method"] == "PUT" else options.max_body_bytes
        max_open = options.max_batch_size + options.max_queue
        body = LimitedBody(receive, max_bytes, deadline, self.open_bodies, max_open)
        scope.setdefault("state", {}).update(id=request_id, deadline=deadline)

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
                answer_headers = MutableHeaders(scope=message)
                answer_headers["x-request-id"] = request_id
                if body.is_late:  # otherwise the connection would stay open for the rest
                    answer_headers["connection"] = "close"
            await send(message)
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            self.check_access(scope["path"], headers)
            body.check_headers(headers)
            await self.app(scope, body.receive, send_with_id)
        except asyncio.CancelledError:
            if not deadline.is_shutdown:
                raise  # at shutdown: the client does not read its answer, and the connection is closed
        except Exception as error:
            response = build_error_response(to_http_error(error, request_id))
            if not status:
                await response(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
            status = status if is_complete else CLIENT_CLOSED_REQUEST
            self.metrics.requests.labels(route, status).inc()
            if self.options.log_requests:
                client = (scope.get("client") or ("",))[0]
                seconds = time.perf_counter() - start
                path = repr(scope["path"][:200])[1:-1]  # it may contain line ends
                log_message(f"{request_id} {client} {scope['method']} {path} {status} {seconds:.3f} s")

    def check_access(self, path: str, headers: Headers) -> None:
        """Raise ApiError: 401 without the key, 403 for a foreign host."""
        if path in OPEN_ROUTES:
            return
        if self.options.api_key is None:
            origin = headers.get("origin", "http://localhost")  # web pages send it, programs do not
            host = headers.get("host", "localhost")
            is_allowed = not {"*", origin}.isdisjoint(self.options.allowed_origins)
            if not is_local_host(host):
                advice = "start the server with --api-key, or let the proxy in front of it send 'Host: localhost'"
                raise ApiError(403, f"host {host[:80]!r} is not this machine; {advice}")
            if not is_local_host(origin.partition("://")[2]) and not is_allowed:
                advice = "start the server with --allowed-origin to allow its web pages"
                raise ApiError(403, f"origin {origin[:80]!r} is not this machine; {advice}")
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        actual = key.strip().encode("latin-1")
        expected = self.options.api_key.encode()
        if scheme.lower() != "bearer" or not hmac.compare_digest(actual, expected):
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class LimitedBody:
    """The body of a request, which must keep arriving, be complete before the deadline, and not be too large.

    If more than `max_open` bodies are open, the request whose body has not moved for longest ends.
    """

    def __init__(
        self, source: Receive, max_bytes: int, deadline: Deadline, open_bodies: OpenBodies, max_open: int
    ) -> None:
        self.source = source
        self.max_bytes = max_bytes
        self.deadline = deadline
        self.open_bodies = open_bodies
        self.max_open = max_open
        self.num_bytes = 0
        self.is_complete = False
        self.is_late = False  # whether the rest of the body arrives too late to be read

    def check_headers(self, headers: Headers) -> None:
        """Raise ApiError if the headers announce a body that is compressed (415) or too large (413)."""
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise ApiError(415, f"Content-Encoding {encoding[:20]!r} is not supported; send the body uncompressed")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.max_bytes:
            raise self.too_large()

    async def receive(self) -> Message:
        """Return the next message. Raises ApiError: 408, 413, and 499 if the client leaves before the body's end."""
        if self.is_complete:
            return await self.source()
        try:
            async with self.deadline.limit(), asyncio.timeout(BODY_SECONDS) as timeout:
                self.open_bodies[self] = timeout
                if len(self.open_bodies) > self.max_open:
                    oldest = self.open_bodies.pop(next(iter(self.open_bodies)))
                    if not oldest.expired():  # one that has just expired cannot be changed
                        oldest.reschedule(0)
                message = await self.source()
        except ApiError:
            self.is_late = True
            raise
        finally:
            self.open_bodies.pop(self, None)
        if message["type"] == "http.disconnect":
            raise build_disconnect_error()
        self.is_complete = not message.get("more_body", False)
        self.num_bytes += len(message.get("body", b""))
        if self.num_bytes > self.max_bytes:
            raise self.too_large()
        return message

    def too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_bytes:,} bytes; send less", code="body_too_large")
