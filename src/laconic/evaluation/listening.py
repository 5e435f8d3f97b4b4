"""A model that learns while it reads, heard: nats of every target, on a fork of a state; and what is kept of an item.

B items, T columns. A plain decoder is heard as well, its cache for a state.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.core import finite
from laconic.core import state as values
from laconic.core.artifact import canonical
from laconic.core.cache import Cache
from laconic.core.contract import UNSCORED, Documents, Learner
from laconic.core.decoder import Decoder, Seen
from laconic.core.families import DecoderConfig
from laconic.core.state import Layer, State
from laconic.evaluation.cells import Cells

SPAN = 1024  # columns read in one call
ROOM = 1 << 22  # logits computed at once


class Cached:
    """A decoder as a learner: what it has read is its cache, and nothing in it learns."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def config(self) -> DecoderConfig:
        """The decoder's."""
        return self.decoder.config

    def start(self, batch: int) -> State:
        """Nothing read."""
        words = cast(Tensor, self.decoder.words.weight)
        cache = Cache.empty(self.config, batch, words.dtype, words.device)
        return State((Layer(cache=cache),), torch.zeros(batch, dtype=torch.long))

    def advance(
        self,
        ids: Tensor,
        state: Any = None,
        *,
        live: Tensor | None = None,
        taught: Tensor | None = None,
        learn: bool = True,
    ) -> Seen:
        """Reads ids behind the cache; `learn` and `taught` mean nothing."""
        before: State = self.start(len(ids)) if state is None else state
        seen = self.decoder(self.decoder.embed(ids), before.layers[0].cache, live=live)
        added = torch.full_like(before.position, ids.shape[1]) if live is None else live.sum(1).cpu()
        return Seen(seen.hidden, cast(Any, State((Layer(cache=seen.state),), before.position + added)), {})

    def logits(self, hidden: Tensor) -> Tensor:
        """The decoder's."""
        return self.decoder.logits(hidden)


@dataclass(frozen=True)
class Way:
    """How items are read: whether fast weights move, and whether a stretch goes on where the one before it ended."""

    name: str
    learn: bool
    carry: bool = False


class Said(NamedTuple):
    """An item in one way: its cells; how often each level fired, the mean over layers; bytes of the state."""

    cells: Cells
    updates: tuple[float, ...]
    bytes: int


class Row(NamedTuple):
    """An item in every way."""

    id: str
    ways: Mapping[str, Said]

    def line(self) -> str:
        """The row as one line of JSON."""
        return canonical({"id": self.id, "ways": {way: said._asdict() for way, said in self.ways.items()}}) + "\n"


def row_of(line: str) -> Row:
    """The row that `line` wrote."""
    found, ways = json.loads(line), dict[str, Said]()
    for way, x in found["ways"].items():
        cells = {cell: (total, n) for cell, (total, n) in x["cells"].items()}
        ways[way] = Said(cells, tuple(x["updates"]), x["bytes"])
    return Row(found["id"], ways)


class Heard(NamedTuple):
    """What reading gave: nats of each target and whether it was the likeliest, 0 where there is none; the state."""

    nats: Float[Tensor, "B T"]
    right: Bool[Tensor, "B T"]
    state: State


def heard(model: Learner, found: Documents, state: State, learn: bool, answer: bool = False) -> Heard:
    """Documents read on a state. An `answer`, the last segment, teaches nothing where a cache lets it be seen."""
    targets, T = found.targets, found.text.shape[1]
    last = found.segments[-1].start if answer else T
    nats, right = torch.zeros(found.text.shape, dtype=torch.float64), torch.zeros_like(found.live)
    for a, b in spans(last, T):
        teaches = learn and (a < last or all(layer.cache is None for layer in state.layers))
        text, live = found.text[:, a:b], found.live[:, a:b]
        seen = finite.read(model, text, state, live=live, learn=teaches, names=found.names)
        state = cast(State, cast(Any, seen.state))
        nats[:, a:b], right[:, a:b] = scores(model, seen.hidden, targets[:, a:b])
    return Heard(nats, right, state)


def spans(last: int, T: int) -> Iterator[tuple[int, int]]:
    """Columns read at once, cut before the last segment."""
    for begin, end in ((0, last), (last, T)):
        for a in range(begin, end, SPAN):
            yield a, min(a + SPAN, end)


def scores(
    model: Learner, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Nats of each target, and whether it was the likeliest word."""
    at = targets != UNSCORED
    states, asked = hidden[at], targets[at]
    nats, right = torch.zeros(len(asked), dtype=torch.float64), torch.zeros_like(asked, dtype=torch.bool)
    step = max(ROOM // model.config.vocab_size, 1)
    for i in range(0, len(asked), step):
        rows, here = model.logits(states[i : i + step]).float(), asked[i : i + step]
        nats[i : i + step] = F.cross_entropy(rows, here, reduction="none")
        right[i : i + step] = rows.argmax(-1) == here
    wide, hit = torch.zeros(targets.shape, dtype=torch.float64), torch.zeros_like(at)
    wide[at.cpu()], hit[at] = nats, right
    return wide, hit


def begun(model: Learner, before: State | None, B: int) -> State:
    """What B items are read on: a fork of one row for each, or nothing read."""
    return model.start(B) if before is None else values.repeat(before, B)


def updates(state: State) -> list[tuple[float, ...]]:
    """Of each row, how often each level has fired, the mean over the layers that have one."""
    levels: list[list[Tensor]] = []
    for layer in state.layers:
        for l, level in enumerate(layer.cms.levels if layer.cms else ()):
            levels += [[]] if l == len(levels) else []
            levels[l].append(level.updates.double())
    means = [torch.stack(each).mean(0).tolist() for each in levels]
    return [tuple(mean[b] for mean in means) for b in range(len(state.position))]
