"""A language model that learns while it reads, trained on documents: what it reads is scored before it is learned.

Nested Learning arXiv:2512.24695. Rows are documents of their own, or lanes: row b of a batch goes on where row b of the
last one ended, on the state that it gave, until a document ends there.

Symbols: T tokens of a row; C_l the chunk of level l.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, cast

from jaxtyping import Bool, Int
from torch import Tensor, nn

from laconic.core import finite
from laconic.core import state as values
from laconic.core.contract import Documents, Step
from laconic.core.errors import Usage
from laconic.core.state import State
from laconic.methods.cot import nll, scored
from laconic.methods.hope_model import Hope
from laconic.methods.learning_settings import Learning, Levels, untrained
from laconic.methods.telemetry import Liveness, chunks_of, told


class Text(NamedTuple):
    """What is read of a batch, and what it predicts."""

    ids: Int[Tensor, "B T"]
    live: Bool[Tensor, "B T"] | None
    targets: Int[Tensor, "B T"]


def text_of(batch: Documents) -> Text:
    """All columns; of lanes without labels all but the last, which is a target and the next batch's first token."""
    n = batch.text.shape[1] - (batch.fresh is not None and batch.labels is None)
    live = batch.live[:, :n]
    return Text(batch.text[:, :n], None if bool(live.all()) else live, batch.targets[:, :n])


class Learner(nn.Module):
    """A Hope in training: nats of scored tokens, while memories and levels learn of all that is read.

    With `learning.learn` False nothing learns but the slow weights: the control. Nothing of a batch is read of the
    state before but where `fresh` says that rows go on.
    """

    def __init__(self, decoder: Hope, learning: Learning | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self.learning = learning or Learning()
        self.liveness = Liveness(chunks_of(decoder))

    def totals(self, batch: Documents) -> dict[str, float]:
        """Scored tokens, and rows, of all pieces."""
        pieces = batch.pieces
        return {"scored": sum(scored(text_of(p).targets) for p in pieces), "rows": float(sum(p.B for p in pieces))}

    def forward(self, batch: Documents, state: State | None = None) -> Step:
        """Nats per scored token, the share of `right` ones, and what the reading did, as `telemetry.told` has it."""
        text, how = text_of(batch), self.learning
        total = batch.totals or self.totals(batch)
        before = begun(self.decoder, batch, state)
        seen = self.decoder.advance(
            text.ids, before, live=text.live, learn=how.learn, gradient=how.gradient, horizon=how.horizon
        )
        after = cast(State, seen.state)
        said = nll(self.decoder.logits, seen.hidden, text.targets, total=total["scored"])
        share, tokens = batch.B / total["rows"], batch.live[:, : text.ids.shape[1]].sum(1).float().mean()
        parts = {"nats": said.loss.detach(), "right": said.right.detach()}
        did = told(self.decoder, before, after, text.ids, tokens, batch.step)
        parts |= {name: (share * x).to(said.loss) for name, x in did.items()}
        return Step(said.loss, parts, handed_on(self.decoder, after))

    def located(self, batch: Documents, state: State | None) -> str:
        """The level or memory that is first not finite, its layer, row and token (contract.Locating)."""
        text, before = text_of(batch), begun(self.decoder, batch, state)
        found = finite.first(self.decoder, text.ids, before, live=text.live) if self.learning.learn else None
        return found.said(batch.names) if found else ""

    def steer(self, numbers: Mapping[str, float]) -> None:
        """Warns once of each level that does not move (contract.Steered)."""
        if self.learning.learn and not self.decoder.shape.levels(0).still:
            self.liveness.look(numbers)

    def restarts(self, batch: Documents) -> bool:
        """Never: one phase."""
        return False


def begun(decoder: Hope, batch: Documents, state: State | None) -> State:
    """The state before a batch: a start for every row, or for the fresh ones of lanes."""
    if state is None:
        return decoder.start(batch.B)
    if batch.fresh is None or not bool(batch.fresh.any()):
        return state
    return values.reset(state, batch.fresh.nonzero()[:, 0].cpu())


def handed_on(decoder: Hope, state: State) -> State:
    """What the next batch goes on from: attention has read nothing, levels and memories stay.

    So attention reads a batch at once, and its positions end with it; an open chunk keeps what it was read on.
    """
    words = cast(Tensor, decoder.words.weight)
    layers = tuple(
        layer if layer.cache is None else replace(layer, cache=decoder.unread(len(state.position), words))
        for layer in state.layers
    )
    return replace(state, layers=layers)


def check_levels(levels: Levels, tokens: int, learning: Learning) -> None:
    """Raises `Usage` (2) for a level that no outer gradient reaches, where rows have `tokens` between two updates."""
    fault = untrained(levels, tokens, learning)
    if fault:
        raise Usage(f"levels.chunks: {fault}")
