"""A run as it is looked into: how it thinks, how it answers from a cache, and what its teacher leaves of a chain.

Evaluation knows no method; `recipe.looking` makes these of a run. Shapes: B rows, M slots, Nc chain columns, G heads of
keys, E width of a head; tuples go by layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from laconic.batches import AnswerBatch, PassCounts, ReasoningBatch
from laconic.latent.rollout import LatentRollout
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder

DecodeToken = Callable[[int], str]
LayerTensors = tuple[Tensor, ...]


class Kept(Protocol):
    """The chain columns that the slots of each head stand for, [B, G, M]; slots without one are not live."""

    @property
    def index(self) -> Tensor: ...
    @property
    def valid(self) -> Tensor: ...


class SelectorChoice(NamedTuple):
    """What one selector keeps of a chain in every layer, and the score [B, G, Nc] it goes by."""

    tokens: tuple[Kept, ...]
    S: LayerTensors


class TeacherChain(NamedTuple):
    """What the teacher leaves of chains in every layer: keys as a cache holds them, keys before rotation, values.

    I and R are importance and redundancy [B, G, Nc], `chosen` the choice of each selector, `own` the one that is looked
    at, in the layers `matched`; `taught`: the run's slots were drawn to it.
    """

    keys: LayerTensors
    keys_before_rope: LayerTensors
    values: LayerTensors
    I: LayerTensors
    R: LayerTensors
    choices: Mapping[str, SelectorChoice]
    policy: str
    matched_layers: tuple[int, ...]
    is_distilled: bool


class LatentKeysValues(NamedTuple):
    """Keys as a cache holds them, keys before rotation, and values at the M slots of every layer, [B, G, M, E]."""

    keys: LayerTensors
    keys_before_rope: LayerTensors
    values: LayerTensors


class Think(Protocol):
    """The thoughts on questions; `rounds` other than those it was trained with."""

    def __call__(
        self, questions: ReasoningBatch, edit: Any = None, trace: bool = False, rounds: int | None = None
    ) -> LatentRollout: ...


@dataclass(frozen=True)
class InspectedRun:
    """A run: `follow` answers from the cache that thoughts left, `left` is None where the method has no teacher.

    `rounds` are those it was trained with, None for thoughts made one after the other.
    """

    name: str
    method: str
    decoder: Decoder
    logits: Callable[[Tensor], Tensor]
    decode_token: DecodeToken
    think: Think
    answer_from_cache: Callable[[ReasoningBatch, KVCache, PassCounts], AnswerBatch]
    teacher_chain: Callable[[ReasoningBatch], TeacherChain] | None
    num_iterations: int | None
    device: torch.device


def latent_keys_values(decoder: Decoder, rollout: LatentRollout) -> LatentKeysValues:
    """What a rollout left at its slots; the thoughts are read once more for their keys before rotation."""
    M, state = rollout.latents.shape[1], rollout.cache
    with torch.no_grad():
        again = decoder(rollout.latents, state.crop(state.S - M), want=("k",))
    before = tuple(again.stages[f"k.{l}"] for l in range(len(state.keys)))
    return LatentKeysValues(tuple(k[:, :, -M:] for k in state.keys), before, tuple(v[:, :, -M:] for v in state.values))
