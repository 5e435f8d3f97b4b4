"""A run as it is looked into: how it thinks, how it answers from a cache, and what its teacher leaves of a chain.

Evaluation knows no method; `recipe.looking` makes these of a run. Shapes: B rows, M slots, Nc chain columns, G heads of
keys, E width of a head; tuples go by layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from laconic.core.cache import Cache
from laconic.core.contract import Answers, Reasoning
from laconic.core.decoder import Decoder
from laconic.core.generate import Passes
from laconic.core.rollout import Rollout

Words = Callable[[int], str]
Layers = tuple[Tensor, ...]


class Kept(Protocol):
    """The chain columns that the slots of each head stand for, [B, G, M]; slots without one are not live."""

    @property
    def index(self) -> Tensor: ...
    @property
    def live(self) -> Tensor: ...


class Choice(NamedTuple):
    """What one selector keeps of a chain in every layer, and the score [B, G, Nc] it goes by."""

    kept: tuple[Kept, ...]
    S: Layers


class Left(NamedTuple):
    """What the teacher leaves of chains in every layer: keys as a cache holds them, keys before rotation, values.

    I and R are importance and redundancy [B, G, Nc], `chosen` the choice of each selector, `own` the one that is looked
    at, in the layers `matched`; `taught`: the run's slots were drawn to it.
    """

    keys: Layers
    before: Layers
    values: Layers
    I: Layers
    R: Layers
    chosen: Mapping[str, Choice]
    own: str
    matched: tuple[int, ...]
    taught: bool


class Slots(NamedTuple):
    """Keys as a cache holds them, keys before rotation, and values at the M slots of every layer, [B, G, M, E]."""

    keys: Layers
    before: Layers
    values: Layers


class Think(Protocol):
    """The thoughts on questions; `rounds` other than those it was trained with."""

    def __call__(
        self, questions: Reasoning, edit: Any = None, trace: bool = False, rounds: int | None = None
    ) -> Rollout: ...


@dataclass(frozen=True)
class Subject:
    """A run: `follow` answers from the cache that thoughts left, `left` is None where the method has no teacher.

    `rounds` are those it was trained with, None for thoughts made one after the other.
    """

    name: str
    method: str
    decoder: Decoder
    logits: Callable[[Tensor], Tensor]
    words: Words
    think: Think
    follow: Callable[[Reasoning, Cache, Passes], Answers]
    left: Callable[[Reasoning], Left] | None
    rounds: int | None
    device: torch.device


def slots(decoder: Decoder, rolled: Rollout) -> Slots:
    """What a rollout left at its slots; the thoughts are read once more for their keys before rotation."""
    M, state = rolled.thoughts.shape[1], rolled.state
    with torch.no_grad():
        again = decoder(rolled.thoughts, state.crop(state.S - M), want=("k",))
    before = tuple(again.stages[f"k.{l}"] for l in range(len(state.keys)))
    return Slots(tuple(k[:, :, -M:] for k in state.keys), before, tuple(v[:, :, -M:] for v in state.values))
