"""Submit the sequences of a request to the engine, and collect their events in the server's event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from laconic.serving.engine import Engine
from laconic.serving.http.api_error import ApiError, build_shutdown_error
from laconic.serving.http.limits import Deadline
from laconic.serving.http.metrics import ServerMetrics
from laconic.serving.requests import EngineEvent, EngineRequest, FinishEvent, PromptEvent, TokenEvent, TokenLogprob


@dataclass
class AnswerPart:
    """The part of a sequence's answer that one event adds, or that all events so far have added."""

    text: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list[TokenLogprob])  # without those that may still be removed
    prompt: PromptEvent | None = None
    finish: FinishEvent | None = None

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's name of the reason why the sequence ended; None while it runs."""
        if self.finish is None:
            return None
        return "length" if self.finish.reason == "length" else "stop"


@dataclass
class WholeAnswer(AnswerPart):
    """The answer of a sequence so far; its tokens exclude those of a stop string and the one that ends it."""

    num_tokens: int = 0  # generated
    waiting: list[TokenEvent] = field(default_factory=list[TokenEvent])  # a stop string or the end may remove them
    last_token_time: float | None = None

    def add(self, event: PromptEvent | TokenEvent | FinishEvent) -> AnswerPart:
        """Add an event, and return its part of the answer."""
        part = AnswerPart()
        if isinstance(event, PromptEvent):
            part.prompt = self.prompt = event
            return part
        if isinstance(event, FinishEvent):
            part.finish = self.finish = event
            certain = self.waiting
            if event.reason == "stop":
                certain = []  # the others are those of the stop string
            elif event.reason == "eos":
                certain = self.waiting[:-1]
        else:
            part.text = event.text
            self.text += event.text
            self.num_tokens += 1
            self.waiting.append(event)
            certain = [token for token in self.waiting if token.offset < len(self.text)]
        self.waiting = self.waiting[len(certain) :]
        part.tokens = [token.logprob for token in certain]
        self.tokens += part.tokens
        return part


class SequenceGroup:
    """The sequences of one request; `close`, and the deadline, cancel those that still run."""

    def __init__(self, engine: Engine, metrics: ServerMetrics, deadline: Deadline) -> None:
        self.engine = engine
        self.metrics = metrics
        self.deadline = deadline
        self.loop = asyncio.get_running_loop()
        self.start = time.monotonic()
        self.queue: asyncio.Queue[tuple[int, EngineEvent]] = asyncio.Queue()
        self.requests: Sequence[EngineRequest] = ()
        self.answers: list[WholeAnswer] = []
        self.ids: dict[int, int] = {}  # engine ids of the sequences that still run, by index in `requests`
        self.timeout_error: ApiError | None = None  # set at the deadline

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Hand sequences to the engine; after an error, `close` cancels those that it has taken."""
        self.requests = requests
        self.answers = [WholeAnswer() for _ in requests]
        for index, request in enumerate(requests):
            self.ids[index] = self.engine.submit(request, partial(self.on_event, index))

    def on_event(self, index: int, event: EngineEvent) -> None:
        """Hand an event over to the event loop; the engine calls this on its thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (index, event))

    async def parts(self) -> AsyncIterator[tuple[int, AnswerPart]]:
        """Yield the index of a sequence and the next part of its answer, until all sequences have ended.

        At the deadline, a sequence without a token raises ApiError (408, 503) after the events of the others.
        """
        is_incomplete = False
        while self.ids:
            index, event = await self.next_event()
            if isinstance(event, FinishEvent | Exception):
                del self.ids[index]
            if isinstance(event, Exception):
                raise event
            self.record(index, event)
            if isinstance(event, FinishEvent) and event.reason == "cancelled":  # at the deadline or shutdown
                event = replace(event, reason="length")
                if not self.answers[index].num_tokens:
                    is_incomplete = True
                    continue
            yield index, self.answers[index].add(event)
        if is_incomplete:
            raise self.timeout_error or build_shutdown_error()

    async def next_event(self) -> tuple[int, EngineEvent]:
        """Wait for an event; at the deadline cancel everything and wait for the engine to report it."""
        if self.timeout_error is None:
            try:
                async with self.deadline.limit():
                    return await self.queue.get()
            except ApiError as error:
                self.timeout_error = error
                self.cancel()
        return await self.queue.get()

    def record(self, index: int, event: EngineEvent) -> None:
        if isinstance(event, TokenEvent):
            now = time.monotonic()
            answer = self.answers[index]
            if answer.last_token_time is None:
                self.metrics.time_to_first_token.observe(now - self.start)
            else:
                self.metrics.inter_token.observe(now - answer.last_token_time)
            answer.last_token_time = now
            self.metrics.generated_tokens.inc()
        elif isinstance(event, PromptEvent):
            self.metrics.cached_tokens.inc(event.num_cached)
        elif isinstance(event, FinishEvent):
            self.metrics.prompt_tokens.inc(self.requests[index].num_prompt_tokens)
            self.metrics.latent_passes.inc(event.latent_passes)

    def cancel(self) -> None:
        """Cancel what still runs; the engine reports the end of each sequence."""
        for sequence in self.ids.values():
            self.engine.cancel(sequence)

    def close(self) -> None:
        """Cancel what still runs, without waiting."""
        self.cancel()
        self.ids.clear()
