"""POST /v1/chat/completions: reply to messages, whole or streamed."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request

from laconic.serving.http.api_error import ApiError
from laconic.serving.http.prompts import PromptPrefix, build_engine_requests, build_generation_config, prepare_chat
from laconic.serving.http.schemas import (
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Completion,
    Delta,
    FinishReason,
    ReplyMessage,
    Usage,
)
from laconic.serving.http.sequences import SequenceGroup, SequenceResult, TextTokens, count_usage, to_finish_reason
from laconic.serving.http.services import (
    GroupDependency,
    Services,
    ServicesDependency,
    StrictRoute,
    json_response,
    run_while_connected,
    stream_chunks,
)
from laconic.serving.requests import EngineRequest, FinishEvent, TokenEvent, TokenLogprob
from laconic.serving.threads import run_in_thread

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatRequest, request: Request, services: ServicesDependency, group: GroupDependency
) -> Any:
    answer = ChatAnswer(services, body)
    group.submit(await answer.prepare())
    if body.stream:
        return stream_chunks(answer.stream(group), request)
    return json_response(await run_while_connected(request, answer.collect(group)))


class ChatAnswer:
    """The answer to one request, of `n` replies.

    Args:
        services: The server's services.
        body: The request.
    """

    def __init__(self, services: Services, body: ChatRequest) -> None:
        self.services, self.body, self.n = services, body, body.n or 1
        self.id, self.created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self.num_top = body.top_logprobs or 0

    async def prepare(self) -> list[EngineRequest]:
        """Return the sequences of the request.

        Raises:
            ApiError: For a request that does not fit the model or the limits.
        """
        body, largest = self.body, self.services.limits.max_queue
        if self.n > largest:
            raise ApiError(400, f"n: {self.n:,} replies in one request; give at most {largest:,}", "n")
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs = true", "top_logprobs")
        if body.logprobs and not self.services.served.has_logprobs:
            raise ApiError(
                400, f"logprobs: the method of {self.services.served.name} has none; remove logprobs", "logprobs"
            )
        prefix = await self.services.resolve_prefix(body)
        return await run_in_thread(self.build_requests, prefix)

    def build_requests(self, prefix: PromptPrefix) -> list[EngineRequest]:
        """Encode the messages; the errors are those of `prepare`."""
        body, served, limits = self.body, self.services.served, self.services.limits
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        prompt = prepare_chat(served, messages, prefix, limits)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        config = build_generation_config(served, body, prompt, max_tokens, limits)
        return build_engine_requests(served, body, prompt, config, num_top_logprobs=self.num_top)

    async def collect(self, group: SequenceGroup) -> Completion:
        results = await group.collect(self.n)
        choices = [self.build_choice(index, result) for index, result in enumerate(results)]
        finishes = [result.finish for result in results if result.finish is not None]
        return self.build("chat.completion", choices, usage=count_usage(finishes, self.n))

    def build_choice(self, index: int, result: SequenceResult) -> ChatChoice:
        assert result.finish is not None
        return ChatChoice(
            index=index,
            message=ReplyMessage(role="assistant", content=result.text, refusal=None),
            logprobs=self.build_logprobs(result.logprobs),
            finish_reason=to_finish_reason(result.finish),
        )

    def build_logprobs(self, tokens: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        """Return the log probabilities of tokens, if they were requested."""
        return self.services.served.token_texts.to_chat(tokens, self.num_top) if self.body.logprobs else None

    async def stream(self, group: SequenceGroup) -> AsyncIterator[Completion]:
        for index in range(self.n):
            yield self.build_chunk(index, Delta(role="assistant", content=""))
        finishes: dict[int, FinishEvent] = {}
        tokens = [TextTokens() for _ in range(self.n)]
        async for index, event in group.events():
            if not isinstance(event, TokenEvent | FinishEvent):
                continue
            certain = tokens[index].add(event)
            logprobs = self.build_logprobs(certain) if certain else None
            if isinstance(event, FinishEvent):
                finishes[index] = event
                yield self.build_chunk(index, Delta(), logprobs, to_finish_reason(event))
            elif event.text or logprobs:
                yield self.build_chunk(index, Delta(content=event.text), logprobs)
        if self.body.should_include_usage:
            usage = count_usage([finishes[index] for index in sorted(finishes)], self.n)
            yield self.build("chat.completion.chunk", [], usage=usage)

    def build_chunk(
        self, index: int, delta: Delta, logprobs: ChatLogprobs | None = None, reason: FinishReason | None = None
    ) -> Completion:
        usage: dict[str, Usage | None] = {"usage": None} if self.body.should_include_usage else {}
        choice = ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)
        return self.build("chat.completion.chunk", [choice], **usage)

    def build(self, kind: str, choices: list[ChatChoice] | list[ChunkChoice], **usage: Usage | None) -> Completion:
        name = self.services.served.name
        return Completion(id=self.id, object=kind, created=self.created, model=name, choices=choices, **usage)
