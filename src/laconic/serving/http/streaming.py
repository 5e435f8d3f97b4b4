"""JSON answers, and server-sent events as OpenAI's API streams them."""

from collections.abc import AsyncIterator

from fastapi import Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent

from laconic.serving.http.api_error import build_error_body, to_http_error
from laconic.serving.http.schemas import Completion
from laconic.storage.strict_json import to_canonical_json


def json_response(completion: Completion) -> Response:
    return Response(completion.model_dump_json(exclude_unset=True), media_type="application/json")


def stream_chunks(chunks: AsyncIterator[Completion], request: Request) -> EventSourceResponse:
    """Return an answer that is sent in chunks, with a final `[DONE]`; an error is the last event."""

    async def write_events() -> AsyncIterator[ServerSentEvent]:
        try:
            async for chunk in chunks:
                yield ServerSentEvent(chunk.model_dump_json(exclude_unset=True), sep="\n")
        except Exception as error:  # the status has been sent, so that the error can only be an event
            body = build_error_body(to_http_error(error, request.state.id))
            yield ServerSentEvent(to_canonical_json(body), sep="\n")
            return
        yield ServerSentEvent("[DONE]", sep="\n")

    return EventSourceResponse(write_events(), sep="\n")
