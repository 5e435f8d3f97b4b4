"""POST /v1/chat/completions and /v1/completions: reply to messages, or continue texts, whole or streamed."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from laconic.experiment.text_models.chat_session import ChatPrefix
from laconic.serving.http.api_error import ApiError
from laconic.serving.http.prompts import Prefix, build_sequences, prepare_chat, prepare_text
from laconic.serving.http.schemas import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from laconic.serving.http.sequences import AnswerPart, SequenceGroup
from laconic.serving.http.services import (
    GroupDependency,
    Services,
    ServicesDependency,
    StrictRoute,
    run_while_connected,
    stream_chunks,
)
from laconic.serving.http.token_text import CompletionLogprobsBuilder, build_chat_logprobs
from laconic.serving.http.worker import run_in_thread
from laconic.serving.requests import EngineRequest, TokenLogprob

Body = TypeVar("Body", bound=GenerationRequest)
Json = dict[str, Any]
router = APIRouter(route_class=StrictRoute)
DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API


@router.post("/v1/chat/completions")
async def create_chat_completion(
    body: ChatRequest, request: Request, services: ServicesDependency, group: GroupDependency
) -> Response:
    return await ChatAnswer(services, body).respond(request, group)


@router.post("/v1/completions")
async def create_completion(
    body: CompletionRequest, request: Request, services: ServicesDependency, group: GroupDependency
) -> Response:
    return await CompletionAnswer(services, body, len(body.prompts)).respond(request, group)


class ApiAnswer(ABC, Generic[Body]):
    """The answer to one request: choices `i * n` to `i * n + n - 1` continue prompt i."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, services: Services, body: Body, num_prompts: int = 1) -> None:
        self.services = services
        self.served = services.served
        self.body = body
        self.n = body.n or 1
        self.num_choices = num_prompts * self.n
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    async def respond(self, request: Request, group: SequenceGroup) -> Response:
        """Start the sequences, and return the answer or the stream of its chunks."""
        largest = self.served.options.max_queue
        if self.num_choices > largest:
            param = "n" if self.num_choices // self.n <= largest else "prompt"
            message = f"{param}: {self.num_choices:,} sequences in one request; give at most {largest:,}"
            raise ApiError(400, message, param)
        prefix = await self.services.resolve_prefix(self.body)
        group.submit(await run_in_thread(self.build_requests, prefix))
        if self.body.stream:
            return stream_chunks(self.stream(group), request)
        return JSONResponse(await run_while_connected(request, self.collect(group)))

    @abstractmethod
    def build_requests(self, prefix: Prefix) -> list[EngineRequest]:
        """Check the options and encode the prompts; the errors are those of `respond`."""

    @abstractmethod
    def build_choice(self, index: int, whole: AnswerPart) -> Json: ...

    @abstractmethod
    def build_chunk(self, index: int, part: AnswerPart) -> Json | None:
        """Return the choice of a chunk; None if a part adds nothing to it."""

    async def collect(self, group: SequenceGroup) -> Json:
        async for _ in group.parts():
            pass
        choices = [self.build_choice(index, whole) for index, whole in enumerate(group.answers)]
        return self.build(self.kind, choices) | {"usage": self.count_usage(group)}

    async def stream(self, group: SequenceGroup) -> AsyncIterator[Json]:
        options = self.body.stream_options or StreamOptions()
        async for choice in self.stream_choices(group):
            usage = self.count_usage(group) if options.continuous_usage_stats else None
            yield self.build(self.chunk_kind, [choice]) | ({"usage": usage} if options.include_usage else {})
        if options.include_usage:
            yield self.build(self.chunk_kind, []) | {"usage": self.count_usage(group)}

    async def stream_choices(self, group: SequenceGroup) -> AsyncIterator[Json]:
        """Yield the choice of each chunk."""
        async for index, part in group.parts():
            choice = self.build_chunk(index, part)
            if choice is not None:
                yield choice

    def build(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name, "choices": choices}

    def count_usage(self, group: SequenceGroup) -> Json:
        """Return the token counts so far, each prompt counted once; latents for models that think."""
        prompt = sum(request.num_prompt_tokens for request in group.requests[:: self.n])
        completion = sum(whole.num_tokens for whole in group.answers)
        usage: Json = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        cached = sum(whole.prompt.num_cached for whole in group.answers[:: self.n] if whole.prompt is not None)
        if cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        finishes = [whole.finish for whole in group.answers if whole.finish is not None]
        passes = sum(finish.latent_passes for finish in finishes)
        positions = sum(finish.latent_positions for finish in finishes)
        if passes or positions:
            usage["completion_tokens_details"] = {"latent_passes": passes, "latent_positions": positions}
        return usage


class ChatAnswer(ApiAnswer[ChatRequest]):
    """The answer to messages, of `n` replies."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def build_requests(self, prefix: Prefix) -> list[EngineRequest]:
        body, served = self.body, self.served
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs = true", "top_logprobs")
        if body.logprobs and not served.has_logprobs:
            raise ApiError(400, f"logprobs: the method of {served.name} has none; remove logprobs", "logprobs")
        self.token_bytes = served.token_bytes if body.logprobs else None  # built on this thread
        prompt = replace(prepare_chat(served, body, prefix), num_top_logprobs=body.top_logprobs or 0)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return build_sequences(served, body, prompt, max_tokens)

    def build_choice(self, index: int, whole: AnswerPart) -> Json:
        message = {"role": "assistant", "content": whole.text, "refusal": None}
        logprobs = self.build_logprobs(whole.tokens)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": whole.finish_reason}

    async def stream_choices(self, group: SequenceGroup) -> AsyncIterator[Json]:
        """Yield the roles at once, as OpenAI does, since the text may come only after a long prompt."""
        for index in range(self.num_choices):
            delta = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        async for choice in super().stream_choices(group):
            yield choice

    def build_chunk(self, index: int, part: AnswerPart) -> Json | None:
        if not part.text and part.finish is None:
            return None
        delta = {"content": part.text} if part.text else {}
        logprobs = self.build_logprobs(part.tokens) if part.tokens else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": part.finish_reason}

    def build_logprobs(self, tokens: Sequence[TokenLogprob]) -> Json | None:
        token_bytes = self.token_bytes
        num_top = self.body.top_logprobs or 0
        return None if token_bytes is None else build_chat_logprobs(token_bytes, tokens, num_top)


class CompletionAnswer(ApiAnswer[CompletionRequest]):
    """The answer to texts or token ids; `echo` and `logprobs` score prompts."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, services: Services, body: CompletionRequest, num_prompts: int) -> None:
        super().__init__(services, body, num_prompts)
        self.has_logprobs = body.logprobs is not None
        self.echo = bool(body.echo)
        self.is_score_only = body.max_tokens == 0  # the engine generates one token, which is left out
        self.echoes: list[str] = []  # text that each choice begins with
        self.builders: list[CompletionLogprobsBuilder] = []  # of each choice, if `logprobs` is given

    def build_requests(self, prefix: Prefix) -> list[EngineRequest]:
        body = self.body
        served = self.served
        has_scores = self.echo and self.has_logprobs
        if self.is_score_only and not self.echo:
            raise ApiError(400, "max_tokens: 0 needs echo, which returns the prompt; give 1 or more", "max_tokens")
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
        requests: list[EngineRequest] = []
        for text in body.prompts:
            prompt = prepare_text(served, text, prefix)
            if has_scores and prompt.question is not None:
                message = f"echo: {served.name} answers questions and has no log probabilities of them; remove echo"
                raise ApiError(400, message, "echo")
            if has_scores and isinstance(prefix, ChatPrefix) and prefix.opening:
                message = "echo: the memory begins a chat, whose template would be scored with the prompt; remove echo"
                raise ApiError(400, message, "echo")
            prompt = replace(prompt, num_top_logprobs=body.logprobs or 0, with_prompt_logprobs=has_scores)
            requests += build_sequences(served, body, prompt, None if body.max_tokens == -1 else max_tokens)
            whole = text if isinstance(text, str) else served.tokenizer.decode(text, skip_special_tokens=False)
            self.echoes += [whole if self.echo else ""] * self.n
        if body.logprobs is not None:
            token_bytes = served.token_bytes  # built on this thread
            self.builders = [CompletionLogprobsBuilder(token_bytes, body.logprobs, echo) for echo in self.echoes]
        return requests

    def build_choice(self, index: int, whole: AnswerPart) -> Json:
        """Return a choice, whole or with one part alone."""
        text, tokens = ("", ()) if self.is_score_only else (whole.text, whole.tokens)
        logprobs = None
        if self.has_logprobs and (tokens or whole.prompt is not None):
            logprobs = self.builders[index].build(tokens, () if whole.prompt is None else whole.prompt.logprobs)
        if whole.prompt is not None:
            text = self.echoes[index] + text
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": whole.finish_reason}

    def build_chunk(self, index: int, part: AnswerPart) -> Json | None:
        choice = self.build_choice(index, part)
        has_tokens = choice["logprobs"] is not None and choice["logprobs"]["tokens"]
        return choice if choice["text"] or has_tokens or choice["finish_reason"] else None

    def count_usage(self, group: SequenceGroup) -> Json:
        """Return the token counts, without the token that the engine generates in addition to a scored prompt."""
        usage = super().count_usage(group)
        if self.is_score_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage
