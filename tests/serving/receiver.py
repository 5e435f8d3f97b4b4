"""Receiver of an engine's events, and requests to an engine that the test drives itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from laconic.experiment.text_models.reasoner import Reasoner
from laconic.serving.engine import Engine
from laconic.serving.http.prompts import encode_question
from laconic.serving.requests import EngineEvent, EngineRequest, FinishEvent, TokenEvent


@dataclass
class Receiver:
    """Events of one request, and how many steps the engine had made when each came."""

    engine: Engine
    id: int = 0
    events: list[EngineEvent] = field(default_factory=list[EngineEvent])
    steps: list[int] = field(default_factory=list[int])

    def __call__(self, event: EngineEvent) -> None:
        self.events.append(event)
        self.steps.append(self.engine.num_steps)

    @property
    def tokens(self) -> list[TokenEvent]:
        return [event for event in self.events if isinstance(event, TokenEvent)]

    @property
    def token_ids(self) -> list[int]:
        return [event.logprob.token_id for event in self.tokens]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.tokens)

    @property
    def finish(self) -> FinishEvent:
        last = self.events[-1]
        assert isinstance(last, FinishEvent), last
        return last


def submit(engine: Engine, token_ids: Sequence[int] = (), question: str = "", **request: Any) -> Receiver:
    """Submit a request and return the receiver of its events."""
    receiver, model = Receiver(engine), engine.served.model
    batch = encode_question(model, question) if isinstance(model, Reasoner) else None
    receiver.id = engine.submit(EngineRequest(tuple(token_ids), batch, **request), receiver)
    return receiver


def run_to_end(engine: Engine, limit: int = 1000) -> None:
    """Run the engine in this thread until nothing is left to do."""
    for _ in range(limit):
        if not engine.run_once():
            return
    raise AssertionError(f"{limit} steps did not finish the requests")
