"""Routes whose JSON bodies are parsed strictly: no NaN, repeated keys, unpaired surrogates or deep nesting."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from laconic.errors import InputError
from laconic.serving.http.api_error import ApiError
from laconic.storage.strict_json import parse_json


class StrictRequest(Request):
    """A request whose body is a JSON object from an untrusted source."""

    async def json(self) -> dict[str, Any]:
        """Return the body. Raises ApiError (400) if it is not a JSON object."""
        try:
            return parse_json(await self.body(), "body")
        except InputError as error:
            raise ApiError(400, str(error)) from None


class StrictRoute(APIRoute):
    """A route that parses bodies as `StrictRequest` does; FastAPI asks for a class per route."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly
