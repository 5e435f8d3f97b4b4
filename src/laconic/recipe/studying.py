"""Texts of any length read into fast weights, side by side and a piece at a time; what is done can be gone on from.

Of a text only one piece is held, besides the tokenizer's window; of a model without attention the state is of one size
from the first token on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from laconic.core import finite, state_file
from laconic.core import state as values
from laconic.core.artifact import open_artifact, save_artifact
from laconic.core.errors import BadInput, Busy
from laconic.core.state import State
from laconic.methods.hope_model import Hope
from laconic.methods.learner import handed_on
from laconic.recipe.compressing import Grid, Text, grid

KIND = "study"  # of the file in which a state is kept before all is read
COUNTS = ("group", "piece", "tokens")


class Document(NamedTuple):
    """A text that was read into a row of a state: its SHA-256 (UTF-8) and its tokens."""

    name: str
    sha256: str
    tokens: int


class Study:
    """Texts on their way into a state: `kept` are the rows that are done, `now` those of the group under way.

    `before` is the state of one row that each text begins on. Attention sees `window` tokens at most: then it begins
    anew, and what was learned stays. `digest` is of all ids, so that whoever goes on with what `save` wrote reads the
    same ones; `begun` is how far that was: groups from 0, pieces of it from 1, and `before_tokens` of all texts.
    """

    def __init__(self, model: Hope, window: int, before: State | None = None) -> None:
        self.model, self.window, self.before = model, window, before
        self.device = model.words.weight.device
        self.kept: State | None = None
        self.now: State | None = None
        self.documents: list[tuple[Document, ...]] = []
        self.names: list[str] = []
        self.digest, self.group, self.piece, self.tokens = sha256(), 0, 0, 0
        self.begun, self.promised, self.before_tokens = (0, 0), "", 0

    def run(self, groups: Iterable[Sequence[Text]]) -> Iterator[State]:
        """The state under way after each piece; when it ends, all rows are in `kept`.

        Raises `BadInput` (66) for a text without a token, and where the texts are not those of the file gone on from;
        `NonFinite` (65) where what is learned is no number.
        """
        at = (0, 0)
        for self.group, group in enumerate(groups):
            self.piece, self.names = 0, [text.name for text in group]
            while any(ids := [text.next() for text in group]):
                self.piece += 1
                self.digest.update(repr(ids).encode())
                at = (self.group, self.piece)
                if at <= self.begun:
                    self.recognise(at < self.begun or self.digest.hexdigest() == self.promised)
                else:
                    self.now = self.advanced(grid(ids, self.device))
                    yield self.now
            self.documents += [(Document(x.name, x.digest.hexdigest(), sum(x.segments)),) for x in group]
            if at >= self.begun and self.now is not None:
                self.kept, self.now = self.now if self.kept is None else values.join(self.kept, self.now), None
        self.recognise(at >= self.begun)

    def recognise(self, same: bool) -> None:
        """Raises `BadInput` (66) unless the texts are those of the file that is gone on from."""
        if not same:
            raise BadInput("--resume: the text is not the one that was begun; give that one, or leave --resume out")

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

    def save(self, path: Path, key: Mapping[str, Any]) -> None:
        """All that is done, as one file; `key` is what the result depends on."""
        tensors, forms = dict[str, torch.Tensor](), dict[str, Any]()
        for part, held in (("now", self.now), ("kept", self.kept)):
            if held is not None:
                own, forms[part] = state_file.apart(held, f"{part}.")
                tensors |= own
        counts = {name: getattr(self, name) for name in COUNTS}
        about = {"key": dict(key), "digest": self.digest.hexdigest(), "forms": forms, **counts}
        save_artifact(path, tensors, KIND, about)

    def load(self, path: Path, key: Mapping[str, Any]) -> None:
        """What `save` wrote, to go on from. Raises `Busy` (73) where it was begun with another key."""
        tensors, about = open_artifact(path, KIND)
        theirs: Mapping[str, Any] = about["key"]
        odd = next((name for name in sorted({*key, *theirs}) if key.get(name) != theirs.get(name)), None)
        if odd is not None:
            raise Busy(
                f"{path} was begun with {odd} {theirs.get(odd)}, asked is {key.get(odd)}; ask the same, or remove it"
            )
        for part, form in about["forms"].items():
            setattr(self, part, values.to(state_file.built(form, tensors, set(tensors)), self.device))
        self.begun, self.promised = (about["group"], about["piece"]), about["digest"]
        self.tokens = self.before_tokens = about["tokens"]


def with_room(model: Hope, state: State, coming: int, window: int) -> State:
    """A state on which so many tokens may be read: where attention has no room for them, it has read nothing yet."""
    cache = next((layer.cache for layer in state.layers if layer.cache is not None), None)
    if cache is None or cache.S + coming <= window:
        return state
    return handed_on(model, state)
