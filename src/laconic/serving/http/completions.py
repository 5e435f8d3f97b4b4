"""POST /v1/completions: continue texts or token ids, whole or streamed; `echo` and `logprobs` score prompts."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from laconic.serving.http.api_error import ApiError
from laconic.serving.http.prompts import PromptPrefix, build_engine_requests, build_generation_config, prepare_text
from laconic.serving.http.schemas import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    FinishReason,
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
from laconic.serving.http.token_text import CompletionLogprobsBuilder
from laconic.serving.requests import EngineRequest, FinishEvent, PromptEvent, TokenEvent
from laconic.serving.threads import run_in_thread

router = APIRouter(route_class=StrictRoute)
DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


@router.post("/v1/completions")
async def create_completion(
    body: CompletionRequest, request: Request, services: ServicesDependency, group: GroupDependency
) -> Any:
    answer = CompletionAnswer(services, body)
    group.submit(await answer.prepare())
    if body.stream:
        return stream_chunks(answer.stream(group), request)
    return json_response(await run_while_connected(request, answer.collect(group)))


class CompletionAnswer:
    """The answer to one request: choices `i * n` to `i * n + n - 1` continue prompt i.

    Args:
        services: The server's services.
        body: The request.
    """

    def __init__(self, services: Services, body: CompletionRequest) -> None:
        self.services, self.body, self.n = services, body, body.n or 1
        self.id, self.created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self.has_logprobs, self.echo = body.logprobs is not None, bool(body.echo)
        self.is_score_only = body.max_tokens == 0  # the engine generates one token, which is left out
        self.echoes: list[str] = []  # text of each prompt, if `echo` repeats it

    async def prepare(self) -> list[EngineRequest]:
        """Return the sequences of the request.

        Raises:
            ApiError: For a request that does not fit the model or the limits.
        """
        count, largest = len(self.body.prompts) * self.n, self.services.limits.max_queue
        if count > largest:
            param = "n" if len(self.body.prompts) <= largest else "prompt"
            raise ApiError(400, f"{param}: {count:,} sequences in one request; give at most {largest:,}", param)
        if self.is_score_only and not self.echo:
            raise ApiError(400, "max_tokens: 0 needs echo, which returns the prompt; give 1 or more", "max_tokens")
        prefix = await self.services.resolve_prefix(self.body)
        return await run_in_thread(self.build_requests, prefix)

    def build_requests(self, prefix: PromptPrefix) -> list[EngineRequest]:
        """Encode the prompts; the errors are those of `prepare`."""
        body, served, limits = self.body, self.services.served, self.services.limits
        requests: list[EngineRequest] = []
        for text in body.prompts:
            prompt = prepare_text(served, text, prefix, limits)
            if self.echo and self.has_logprobs and prompt.question is not None:
                message = f"echo: {served.name} answers questions and has no log probabilities of them; remove echo"
                raise ApiError(400, message, "echo")
            if self.echo and self.has_logprobs and prefix.memory is not None and prefix.memory.opening:
                message = "echo: the memory begins a chat, whose template would be scored with the prompt; remove echo"
                raise ApiError(400, message, "echo")
            max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
            requests += build_engine_requests(
                served,
                body,
                prompt,
                build_generation_config(served, body, prompt, max_tokens, limits),
                num_top_logprobs=body.logprobs or 0,
                with_prompt_logprobs=self.echo and self.has_logprobs,
            )
            whole = text if isinstance(text, str) else served.tokenizer.decode(text, skip_special_tokens=False)
            self.echoes.append(whole if self.echo else "")
        return requests

    async def collect(self, group: SequenceGroup) -> Completion:
        results = await group.collect(len(self.echoes) * self.n)
        choices = [self.build_choice(index, result) for index, result in enumerate(results)]
        finishes = [result.finish for result in results if result.finish is not None]
        return self.build(choices, usage=self.count_usage(finishes))

    def count_usage(self, finishes: Sequence[FinishEvent]) -> Usage:
        """Return the token counts, without the token that nobody asked for."""
        if self.is_score_only:
            finishes = [replace(finish, num_tokens=0) for finish in finishes]
        return count_usage(finishes, self.n)

    def build_choice(self, index: int, result: SequenceResult) -> CompletionChoice:
        assert result.finish is not None
        tokens = () if self.is_score_only else result.logprobs
        logprobs = self.logprobs_builder(index).build(tokens, result.prompt_logprobs) if self.has_logprobs else None
        text = self.echoes[index // self.n] + ("" if self.is_score_only else result.text)
        return self.choice(index, text, logprobs, to_finish_reason(result.finish))

    def logprobs_builder(self, index: int) -> CompletionLogprobsBuilder:
        echo = self.echoes[index // self.n]
        return CompletionLogprobsBuilder(self.services.served.token_texts, self.body.logprobs or 0, echo)

    async def stream(self, group: SequenceGroup) -> AsyncIterator[Completion]:
        builders = [self.logprobs_builder(index) for index in range(len(self.echoes) * self.n)]
        tokens = [TextTokens() for _ in builders]
        finishes: dict[int, FinishEvent] = {}
        async for index, event in group.events():
            text, logprobs, reason, builder = "", None, None, builders[index]
            if isinstance(event, PromptEvent):
                text = self.echoes[index // self.n]
                logprobs = builder.build((), event.logprobs) if event.logprobs else None
            elif isinstance(event, TokenEvent | FinishEvent) and not self.is_score_only:
                certain = tokens[index].add(event)
                logprobs = builder.build(certain) if certain and self.has_logprobs else None
                text = event.text if isinstance(event, TokenEvent) else ""
            if isinstance(event, FinishEvent):
                finishes[index], reason = event, to_finish_reason(event)
            if text or logprobs or reason:
                yield self.build([self.choice(index, text, logprobs, reason)])
        if self.body.should_include_usage:
            yield self.build([], usage=self.count_usage([finishes[index] for index in sorted(finishes)]))

    def choice(
        self, index: int, text: str, logprobs: CompletionLogprobs | None, reason: FinishReason | None
    ) -> CompletionChoice:
        return CompletionChoice(text=text, index=index, logprobs=logprobs, finish_reason=reason)

    def build(self, choices: list[CompletionChoice], **usage: Any) -> Completion:
        if self.body.should_include_usage:
            usage = {"usage": None} | usage
        name = self.services.served.name
        return Completion(
            id=self.id, object="text_completion", created=self.created, model=name, choices=choices, **usage
        )
