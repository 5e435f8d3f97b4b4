"""Sequences of one request in the engine, and their events in the server's event loop."""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from laconic.serving.engine import Engine
from laconic.serving.http.limits import Deadline
from laconic.serving.http.metrics import ServerMetrics
from laconic.serving.requests import (
    EngineEvent,
    EngineRequest,
    ErrorEvent,
    FinishEvent,
    PromptEvent,
    TokenEvent,
    TokenLogprob,
)


@dataclass
class TextTokens:
    """The tokens of an answer's text, without those of a stop string and the one that ends the sequence."""

    length: int = 0  # characters of the text so far
    waiting: list[TokenEvent] = field(default_factory=list[TokenEvent])  # a stop string or the end may remove them

    def add(self, event: TokenEvent | FinishEvent) -> list[TokenLogprob]:
        """Return the tokens that are now known to belong to the text, in order."""
        if isinstance(event, FinishEvent):
            certain = {"stop": [], "eos": self.waiting[:-1]}.get(event.reason, self.waiting)
            self.waiting = []
        else:
            self.length += len(event.text)
            self.waiting.append(event)
            certain = [token for token in self.waiting if token.offset < self.length]
            self.waiting = self.waiting[len(certain) :]
        return [token.logprob for token in certain]


@dataclass
class AnswerPart:
    """What an event, or all events, of a sequence add to its answer."""

    text: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list[TokenLogprob])  # now known to belong to the text
    prompt: PromptEvent | None = None
    finish: FinishEvent | None = None

    @property
    def finish_reason(self) -> str | None:
        """Why the sequence ended, in OpenAI's words."""
        return None if self.finish is None else "length" if self.finish.reason == "length" else "stop"

    def extend(self, part: "AnswerPart") -> None:
        """Add the next part."""
        self.text += part.text
        self.tokens += part.tokens
        self.prompt, self.finish = self.prompt or part.prompt, self.finish or part.finish


class SequenceGroup:
    """The sequences of one request; `close`, and the deadline, cancel those that still run."""

    def __init__(self, engine: Engine, metrics: ServerMetrics, deadline: Deadline) -> None:
        self.engine, self.metrics, self.deadline = engine, metrics, deadline
        self.loop, self.start = asyncio.get_running_loop(), time.monotonic()
        self.queue: asyncio.Queue[tuple[int, EngineEvent]] = asyncio.Queue()
        self.ids: dict[int, int] = {}  # ids in the engine of the sequences that still run, by index
        self.times: dict[int, float] = {}  # time of each sequence's last token
        self.is_late = False

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Hand sequences to the engine; after an error, `close` cancels those that it has taken."""
        for index, request in enumerate(requests):
            self.ids[index] = self.engine.submit(request, partial(self.on_event, index))

    def on_event(self, index: int, event: EngineEvent) -> None:
        """Hand an event over to the event loop; the engine calls this on its thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.queue.put_nowait, (index, event))

    async def events(self) -> AsyncIterator[tuple[int, PromptEvent | TokenEvent | FinishEvent]]:
        """Yield events with the index of their sequence until all have ended.

        Raises:
            ApiError: 408, or 503, at the deadline, if a sequence has no token yet; after the events of the others.
            Exception: The error of a sequence that fails.
        """
        is_incomplete = False
        while self.ids:
            index, event = await self.next_event()
            self.record(index, event)
            if isinstance(event, FinishEvent | ErrorEvent):
                del self.ids[index]
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, FinishEvent) and event.reason == "cancelled":
                if index not in self.times:
                    is_incomplete = True
                    continue
                event = replace(event, reason="length")
            yield index, event
        if is_incomplete:
            raise self.deadline.build_error("the request took too long; shorten it, or raise --max-seconds")

    async def next_event(self) -> tuple[int, EngineEvent]:
        """Wait for an event; at the deadline cancel everything and wait for the engine to report it."""
        if not self.is_late:
            with suppress(TimeoutError):
                async with self.deadline.limit():
                    return await self.queue.get()
            self.is_late = True
            self.cancel()
        return await self.queue.get()

    async def parts(self) -> AsyncIterator[tuple[int, AnswerPart]]:
        """Yield what each event adds to the answer of its sequence; the errors are those of `events`."""
        tokens = defaultdict[int, TextTokens](TextTokens)
        async for index, event in self.events():
            match event:
                case PromptEvent():
                    yield index, AnswerPart(prompt=event)
                case TokenEvent():
                    yield index, AnswerPart(event.text, tokens[index].add(event))
                case FinishEvent():
                    yield index, AnswerPart(tokens=tokens[index].add(event), finish=event)

    def record(self, index: int, event: EngineEvent) -> None:
        """Count tokens, passes and times."""
        if isinstance(event, TokenEvent):
            now, before = time.monotonic(), self.times.get(index)
            if before is None:
                self.metrics.time_to_first_token.observe(now - self.start)
            else:
                self.metrics.inter_token.observe(now - before)
            self.times[index] = now
            self.metrics.generated_tokens.inc()
        elif isinstance(event, FinishEvent):
            self.metrics.prompt_tokens.inc(event.num_prompt_tokens)
            self.metrics.latent_passes.inc(event.latent_passes)

    def cancel(self) -> None:
        """Cancel what still runs; the engine reports the end of each sequence."""
        for sequence in self.ids.values():
            self.engine.cancel(sequence)

    def close(self) -> None:
        """Cancel what still runs, without waiting."""
        self.cancel()
        self.ids.clear()


def count_usage(finishes: Sequence[FinishEvent], n: int) -> dict[str, Any]:
    """Return the token counts of an answer, each prompt counted once; latents for models that think."""
    prompt = sum(finish.num_prompt_tokens for finish in finishes[::n])
    completion = sum(finish.num_tokens for finish in finishes)
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    usage["total_tokens"] = prompt + completion
    passes = sum(finish.latent_passes for finish in finishes)
    positions = sum(finish.latent_positions for finish in finishes)
    if passes or positions:
        usage["completion_tokens_details"] = {"latent_passes": passes, "latent_positions": positions}
    return usage
