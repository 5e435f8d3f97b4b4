"""Errors of the HTTP API, in OpenAI's format."""

import json
import traceback
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from laconic.console import log_message
from laconic.errors import DiskError, InputError, LaconicError, UnsafeFileError, UsageError
from laconic.serving.engine import EngineClosedError, QueueFullError
from laconic.serving.http.schemas import NEUTRAL_MESSAGE_FIELDS, UNSUPPORTED_PARAMETERS

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
EXPECTED_TYPES = {  # parameters of several types, for which pydantic would report one message per type
    "prompt": "a text, a list of texts, a list of token ids, or a list of lists of token ids, none of them empty",
    "stop": "a text or a list of texts, none of them empty",
    "memory": "the id or name of a memory, or a list of these",
}
REASONS = {  # by pydantic's type of error; {value} is the value
    "string_type": "expected a text, not {value}", "list_type": "expected a list, not {value}",
    "dict_type": "expected an object, not {value}", "model_attributes_type": "expected an object, not {value}",
    "int_type": "expected an integer, not {value}", "int_from_float": "expected an integer, not {value}",
    "float_type": "expected a number, not {value}", "bool_type": "expected true or false, not {value}",
    "literal_error": "expected {expected}, not {value}", "string_too_short": "the text is empty; give text",
    "greater_than_equal": "{value} given; give at least {ge:g}",
    "less_than_equal": "{value} given; give at most {le:g}",
    "too_short": "the list is empty; give at least one item",
    "too_long": "{actual_length:,} items given; give at most {max_length:,}",
    "string_too_long": "give at most {max_length:,} characters",
}  # fmt: skip
CLIENT_CLOSED_REQUEST = 499  # in the metrics: the client left before the whole answer was sent
# OpenAI's clients retry after 408 and 409 on their own, but would get the same answer again.
NO_RETRY_HEADER = {"x-should-retry": "false"}


class ApiError(HTTPException):
    """An error of a request, with the parameter at fault and a code that clients can test."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        extra = NO_RETRY_HEADER if status in (408, 409) else {}
        super().__init__(status, message, {**extra, **(headers or {})})
        self.param, self.code = param, code


def build_shutdown_error() -> ApiError:
    """Return the 503 error for a request that the server's shutdown ends."""
    message = "the server is shutting down; send the request again"
    return ApiError(503, message, code="shutting_down", headers={"Retry-After": "1"})


def to_http_error(error: Exception, request_id: str) -> HTTPException:
    """Return the HTTP error for an exception, and log errors that the request did not cause."""
    match error:
        case HTTPException():
            return error
        case UsageError() | InputError() | UnsafeFileError():
            return ApiError(400, str(error))
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
        case EngineClosedError():
            return build_shutdown_error()
        case DiskError():
            log_message(f"laconic: request {request_id}: {error}")
            message = f"the server cannot write to its disk; its log has the reason under request {request_id}"
            return ApiError(503, message, code="disk_error")
        case _:
            trace = "".join(traceback.format_exception(error))
            log_message(f"laconic: request {request_id} failed\n{trace.rstrip()}")
            return ApiError(500, f"internal error; the server's log has it under request {request_id}")


def build_disconnect_error() -> ApiError:
    """Return the error of a request whose client has left; only the metrics and the log see it."""
    return ApiError(CLIENT_CLOSED_REQUEST, "the client has closed the connection")


def build_error_body(error: HTTPException) -> dict[str, Any]:
    status = error.status_code
    message = str(error.detail)
    if not isinstance(error, ApiError):  # raised by Starlette, which sets only the phrase of the status
        message = f"{message}: {HTTPStatus(status).description or 'the request cannot be handled'}"
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def build_error_response(error: HTTPException) -> JSONResponse:
    return JSONResponse(build_error_body(error), status_code=error.status_code, headers=error.headers)


def build_validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the 400 error that names the first invalid parameter of pydantic's errors.

    A field that is not supported comes first: beside `tool_calls`, for example, messages have no `content`. So does a
    list that is too long: the other errors of a parameter of several types are about its other types.
    """
    telling = (error for kind in ("extra_forbidden", "too_long") for error in errors if error["type"] == kind)
    first = next(telling, errors[0])
    path: Sequence[Any] = first["loc"][1:]
    if not path and first["type"] == "value_error":
        return ApiError(400, str(first["msg"]).removeprefix("Value error, "), code="invalid_value")
    if not path:
        message = "the body is not a JSON object; send one, with the header Content-Type: application/json"
        return ApiError(400, message)
    kind = first["type"]
    param = str(path[0])
    field = str(path[-1])[:80]
    name = param
    fields: Sequence[Any] = ()
    if len(path) > 1 and isinstance(path[1], int):
        name += f"[{path[1]}]"
        fields = path[2:3]
    elif param not in EXPECTED_TYPES:  # whose path[1] is the type that the error is about
        fields = path[1:2]
    if kind not in ("extra_forbidden", "missing"):
        name += "".join(f".{part}" for part in fields)
    place = "" if len(path) == 1 else f"{name}: "
    unsupported = UNSUPPORTED_PARAMETERS if len(path) == 1 else NEUTRAL_MESSAGE_FIELDS
    match kind:
        case "extra_forbidden" if field in unsupported:
            message, code = f"{place}{field} is not supported; remove it", "unsupported_parameter"
        case "extra_forbidden":
            message, code = f"{place}unknown parameter {field!r}; remove it", "unknown_parameter"
        case "missing":
            message, code = f"{place}missing parameter {field!r}; give it", "missing_parameter"
        case _ if len(path) > 1 and param in EXPECTED_TYPES and not str(kind).startswith(("value", "too_")):
            message, code = f"{name}: expected {EXPECTED_TYPES[param]}", "invalid_value"
        case _:
            message, code = f"{name}: {describe_problem(first)}", "invalid_value"
    return ApiError(400, message, param[:80], code)


def describe_problem(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a value: what it is, and what is expected."""
    template = REASONS.get(error["type"])
    if template is None:
        reason = str(error["msg"]).removeprefix("Value error, ")
        return reason[:1].lower() + reason[1:]
    match error["input"]:
        case str(text):
            value = repr(text[:40])
        case list(items):
            value = "a list" if items else "an empty list"
        case dict():
            value = "an object"
        case other:  # null, true, false or a number
            value = json.dumps(other)[:40]
    return template.format(value=value, **error.get("ctx", {}))


def build_route_error(request: Request, routes: Sequence[APIRoute]) -> ApiError:
    """Return the 405 error for a path with other methods, or a 404 error that lists the paths without parameters."""
    path = request.url.path[:80]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    if matching:
        methods = ", ".join(sorted({method for route in matching for method in route.methods or ()}))
        return ApiError(405, f"{path!r} takes {methods}, not {request.method[:20]}", headers={"Allow": methods})
    paths = ", ".join(sorted({route.path.rstrip("/") for route in routes if "{" not in route.path}))
    return ApiError(404, f"{path!r} is not a route of this server; it has {paths}", code="unknown_route")


def install_error_handlers(app: FastAPI, routes: Sequence[APIRoute]) -> None:
    """Answer all errors in OpenAI's format; the message about an unknown path lists the routes."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            error = build_validation_error(error.errors())
        elif isinstance(error, HTTPException) and not isinstance(error, ApiError) and error.status_code in (404, 405):
            error = build_route_error(request, routes)
        return build_error_response(to_http_error(error, request.state.id))

    for kind in (HTTPException, RequestValidationError, LaconicError):
        app.add_exception_handler(kind, handle)
