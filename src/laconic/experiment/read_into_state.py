"""Read texts of any length into fast weights in parallel, with save and resume."""

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
    """A text that a row of a state has read: name, SHA-256 of its UTF-8 bytes, and number of tokens."""

    name: str
    sha256: str
    tokens: int


class StateReadingJob(ResumableReading[FastWeightState]):
    """Job that reads texts into fast weights; `run` raises NonFiniteError if one is not finite.

    Args:
        model: The model.
        window: Largest number of tokens that attention sees; when it is full, the cache is emptied and the fast weights
            stay.
        initial_state: State of one row that every text continues.
    """

    kind = "state-reading-job"

    def __init__(self, model: Hope, window: int, initial_state: FastWeightState | None = None) -> None:
        super().__init__(model.token_embedding.weight.device)
        self.model, self.window, self.initial_state = model, window, initial_state

    @property
    def documents(self) -> list[tuple[ReadDocument, ...]]:
        """Texts of the finished rows."""
        return [(ReadDocument(x.name, x.digest.hexdigest(), sum(x.segments)),) for x in self.texts]

    @torch.no_grad()
    def advance(self, piece: PaddedIds) -> FastWeightState:
        state = self.current
        if state is None:
            B = len(piece.input_ids)
            state = (
                self.model.initial_state(B) if self.initial_state is None else values.repeat_rows(self.initial_state, B)
            )
        state = fit_attention_window(self.model, state, piece.input_ids.shape[1], self.window)
        mask = None if bool(piece.attention_mask.all()) else piece.attention_mask
        after = cast(
            FastWeightState,
            nan_check.read_tokens_checked(
                self.model, piece.input_ids, state, attention_mask=mask, row_names=self.names
            ).cache,
        )
        self.tokens += int(piece.attention_mask.sum())
        return after

    def append_rows(self, before: FastWeightState | None, done: FastWeightState) -> FastWeightState:
        return done if before is None else values.concat_rows(before, done)

    def to_tensors(self, value: FastWeightState, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        return flatten_tree(value, prefix)

    def from_tensors(self, spec: Any, tensors: Mapping[str, Tensor], prefix: str) -> FastWeightState:
        return values.to(unflatten_tree(spec, tensors, set(tensors), state_file.NODE_TYPES), self.device)


def fit_attention_window(model: Hope, state: FastWeightState, num_new_tokens: int, window: int) -> FastWeightState:
    """Empty the attention cache of a state if `num_new_tokens` do not fit into the window; fast weights stay."""
    cache = next((layer.cache for layer in state.layers if layer.cache is not None), None)
    if cache is None or cache.S + num_new_tokens <= window:
        return state
    return carry_state(model, state)
