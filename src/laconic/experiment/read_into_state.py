"""Texts of any length read into fast weights, side by side and a piece at a time.

The state of a model without attention is of one size from the first token on.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from laconic.experiment.resumable_stream import PaddedIds, ResumableReading
from laconic.nested import nan_check, state_file
from laconic.nested import state as values
from laconic.nested.hope.model import Hope
from laconic.nested.language_model import carry_state
from laconic.nested.state import FastWeightState
from laconic.storage.tensor_tree import flatten_tree, unflatten_tree


class ReadDocument(NamedTuple):
    """A text that was read into a row of a state: its SHA-256 (UTF-8) and its tokens."""

    name: str
    sha256: str
    tokens: int


class StateReadingJob(ResumableReading[FastWeightState]):
    """Texts on their way into a state; `before` is the state of one row that each text begins on.

    Attention sees `window` tokens at most: then it begins anew, and what was learned stays. `run` raises `NonFinite`
    (65) where what is learned is no number.
    """

    kind = "study"

    def __init__(self, model: Hope, window: int, before: FastWeightState | None = None) -> None:
        super().__init__(model.token_embedding.weight.device)
        self.model, self.window, self.initial_state = model, window, before

    @property
    def documents(self) -> list[tuple[ReadDocument, ...]]:
        """What each row that is done has read."""
        return [(ReadDocument(x.name, x.digest.hexdigest(), sum(x.segments)),) for x in self.texts]

    @torch.no_grad()
    def advance(self, piece: PaddedIds) -> FastWeightState:
        """The state after one more piece of every text that still has one."""
        state = self.current
        if state is None:
            B = len(piece.input_ids)
            state = (
                self.model.initial_state(B) if self.initial_state is None else values.repeat_rows(self.initial_state, B)
            )
        state = fit_attention_window(self.model, state, piece.input_ids.shape[1], self.window)
        live = None if bool(piece.attention_mask.all()) else piece.attention_mask
        after = cast(
            FastWeightState,
            nan_check.read_tokens_checked(
                self.model, piece.input_ids, state, attention_mask=live, row_names=self.names
            ).cache,
        )
        self.tokens += int(piece.attention_mask.sum())
        return after

    def append_rows(self, before: FastWeightState | None, done: FastWeightState) -> FastWeightState:
        """All rows."""
        return done if before is None else values.concat_rows(before, done)

    def to_tensors(self, held: FastWeightState, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        """As a state's file has it."""
        return flatten_tree(held, prefix)

    def from_tensors(self, form: Any, tensors: Mapping[str, Tensor], prefix: str) -> FastWeightState:
        """From its form, which names its tensors."""
        return values.to(unflatten_tree(form, tensors, set(tensors), state_file.NODE_TYPES), self.device)


def fit_attention_window(model: Hope, state: FastWeightState, num_new_tokens: int, window: int) -> FastWeightState:
    """A state on which so many tokens may be read: where attention has no room for them, it has read nothing yet."""
    cache = next((layer.cache for layer in state.layers if layer.cache is not None), None)
    if cache is None or cache.S + num_new_tokens <= window:
        return state
    return carry_state(model, state)
