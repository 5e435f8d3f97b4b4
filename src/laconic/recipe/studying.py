"""Texts of any length read into fast weights, side by side and a piece at a time.

The state of a model without attention is of one size from the first token on.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from laconic.core import finite, state_file
from laconic.core import state as values
from laconic.core.state import State
from laconic.methods.hope_model import Hope
from laconic.methods.learner import handed_on
from laconic.recipe.going import Going, Grid


class Document(NamedTuple):
    """A text that was read into a row of a state: its SHA-256 (UTF-8) and its tokens."""

    name: str
    sha256: str
    tokens: int


class Study(Going[State]):
    """Texts on their way into a state; `before` is the state of one row that each text begins on.

    Attention sees `window` tokens at most: then it begins anew, and what was learned stays. `run` raises `NonFinite`
    (65) where what is learned is no number.
    """

    kind = "study"

    def __init__(self, model: Hope, window: int, before: State | None = None) -> None:
        super().__init__(model.words.weight.device)
        self.model, self.window, self.before = model, window, before

    @property
    def documents(self) -> list[tuple[Document, ...]]:
        """What each row that is done has read."""
        return [(Document(x.name, x.digest.hexdigest(), sum(x.segments)),) for x in self.texts]

    @torch.no_grad()
    def advanced(self, piece: Grid) -> State:
        """The state after one more piece of every text that still has one."""
        state = self.now
        if state is None:
            B = len(piece.text)
            state = self.model.start(B) if self.before is None else values.repeat(self.before, B)
        state = with_room(self.model, state, piece.text.shape[1], self.window)
        live = None if bool(piece.live.all()) else piece.live
        after = cast(State, finite.read(self.model, piece.text, state, live=live, names=self.names).state)
        self.tokens += int(piece.live.sum())
        return after

    def joined(self, before: State | None, done: State) -> State:
        """All rows."""
        return done if before is None else values.join(before, done)

    def apart(self, held: State, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        """As a state's file has it."""
        return state_file.apart(held, prefix)

    def built(self, form: Any, tensors: Mapping[str, Tensor], prefix: str) -> State:
        """From its form, which names its tensors."""
        return values.to(state_file.built(form, tensors, set(tensors)), self.device)


def with_room(model: Hope, state: State, coming: int, window: int) -> State:
    """A state on which so many tokens may be read: where attention has no room for them, it has read nothing yet."""
    cache = next((layer.cache for layer in state.layers if layer.cache is not None), None)
    if cache is None or cache.S + coming <= window:
        return state
    return handed_on(model, state)
