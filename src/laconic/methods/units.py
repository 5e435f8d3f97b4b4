"""The unit of one segment: read with the memory before it and compressed, recomputed backward as a whole if asked.

Eq. AC5 stands here as the nats of a segment. B rows, T columns of text, K places, D width.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.core.attention import wide
from laconic.core.contract import UNSCORED
from laconic.core.decoder import Decoder
from laconic.core.memory import Memory
from laconic.methods.halting import scaled
from laconic.methods.policies import Kept, check_room, grown, over
from laconic.methods.segments import Done, Written, last, positions_of, read, write
from laconic.methods.settings import Reading
from laconic.methods.summaries import Summaries, pooled, selected

Both = tuple[Tensor, Written | None]
recomputed: Callable[..., Both] = partial(checkpoint, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]


class Nats(NamedTuple):
    """Summed cross-entropy of each row in nats, and how many of its likeliest ids were right."""

    sum: Float[Tensor, " B"]
    right: Float[Tensor, " B"]


def untriggered(targets: Int[Tensor, "B T"], live: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Eq. CP1: targets of a segment whose last token the trigger replaces: that token is none and predicts none."""
    gone = last(live)
    before = last(live & ~gone)
    return targets.masked_fill(gone | before, UNSCORED)


@dataclass(frozen=True)
class Unit:
    """A decoder with what is learned beside it; `base` is a context in which the decoder reads without its adapter."""

    decoder: Decoder
    summaries: Summaries
    bos: int | None = None
    base: Callable[[], AbstractContextManager[object]] | None = None

    @property
    def reading(self) -> Reading:
        """The settings."""
        return self.summaries.reading

    def reader(self) -> AbstractContextManager[object]:
        """The decoder as it reads: with `adapt` write the base model."""
        return self.base() if self.reading.adapt == "write" and self.base is not None else nullcontext()

    def empty(self, B: int) -> Memory:
        """No memory, of the decoder's type and device."""
        table = self.decoder.words.weight
        return Memory.empty(B, table.shape[1], table.dtype, table.device)

    @property
    def lead(self) -> int:
        """Columns that stand before the memory."""
        return int(self.bos is not None and self.reading.bos in ("sink", "first"))

    def check(self, memory: Memory, segment: int, *, writes: bool = True) -> None:
        """Raises `Usage` (2) where a memory and a segment of so many tokens, compressed or read, do not fit."""
        reserved = positions_of(self.reading, self.decoder.config) == "reserved"
        slots = int((memory.block_lengths > 0).sum(1).amax()) * self.reading.fixed if reserved else memory.M
        check_room(self.decoder.config, self.reading, self.lead, segment, slots, writes=writes)

    def gated(self, memory: Memory) -> Memory:
        """A memory as it is read: what is soft has its bias, or scaled vectors (CP5), or is read as if it were hard."""
        how = self.summaries.halting
        gate = how.gate if how is not None and self.reading.length == "stop" else "bias"
        if memory.log_s is None or gate == "bias":
            return memory
        vectors = scaled(memory.vectors, memory.log_s) if gate == "scale" else memory.vectors
        return replace(memory, vectors=vectors, log_s=None)

    def read(self, memory: Memory, text: Int[Tensor, "B T"], live: Bool[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """States of a text that follows a memory."""
        before = self.gated(memory)
        with self.reader():
            return read(self.decoder, self.reading, before, self.decoder.embed(text), live, None, self.bos).text

    def write(
        self,
        memory: Memory,
        text: Int[Tensor, "B T"],
        live: Bool[Tensor, "B T"],
        n: int,
        graph: bool = True,
        done: Done | None = None,
    ) -> Written:
        """States from which a text's vectors are made; the older memory stands before it only where it is recurrent."""
        before = self.gated(memory) if self.reading.recurrent else memory.only(torch.zeros_like(memory.live)).pack()
        words = self.decoder.embed(text)
        return write(self.decoder, self.summaries, before, words, live, n, self.bos, graph=graph, done=done)

    def both(
        self, memory: Memory, text: Int[Tensor, "B T"], live: Bool[Tensor, "B T"], n: int, graph: bool = True
    ) -> Both:
        """States of the text as it is read, and for n > 0 what compressing it gives: in one pass where both agree."""
        if n == 0:
            return self.read(memory, text, live), None
        written = self.write(memory, text, live, n, graph)
        together = self.reading.recurrent and self.reading.adapt == "both"
        return (written.text if together else self.read(memory, text, live)), written

    def unit(
        self, memory: Memory, text: Int[Tensor, "B T"], live: Bool[Tensor, "B T"], n: int, graph: bool = True
    ) -> Both:
        """The same, computed again backward where segments are checkpointed."""
        if self.reading.checkpoint_segments and self.summaries.training and torch.is_grad_enabled():
            return recomputed(self.both, memory, text, live, n, graph)
        return self.both(memory, text, live, n, graph)

    def nats(self, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]) -> Nats:
        """Eq. AC5: -sum over j of log p(x_{j+1} | M_{i-1}, x_{<=j}) of each row; logits of scored tokens alone."""
        at = (targets != UNSCORED).nonzero(as_tuple=True)
        rows = self.summaries.logits(self.decoder, hidden[at])
        asked, rows = targets[at], rows.to(wide(rows.dtype))
        each = F.cross_entropy(rows, asked, reduction="none")
        hit = (rows.detach().argmax(-1) == asked).to(each.dtype)
        nothing = each.new_zeros(len(targets))
        return Nats(nothing.index_add(0, at[0], each), nothing.index_add(0, at[0], hit))

    def kept(self, written: Written, live: Bool[Tensor, "B T"], N: Int[Tensor, " B"]) -> Kept:
        """The vectors of a segment whose length is decided: hard."""
        K = written.states.shape[1] if self.reading.generator in ("parallel", "self") else self.reading.fixed
        if self.reading.generator == "pool":
            means, there = pooled(written.text, live, N, K)
            return Kept(self.summaries.vectors(means), there)
        if self.reading.generator == "select":
            r = self.summaries.scores(written.text)
            columns, there = selected(r, live, N, K)
            h = written.text.gather(1, columns[..., None].expand(-1, -1, written.text.shape[2]))
            r = r.gather(1, columns).float()
            bias = r - r.detach() if torch.is_grad_enabled() else None
            return Kept(self.summaries.vectors(h), there, bias)
        there = (torch.arange(K, device=N.device) < N[:, None]) & live.any(1, keepdim=True)
        return Kept(self.summaries.vectors(written.states), there)

    def after(self, memory: Memory, kept: Kept, tokens: Int[Tensor, " B"]) -> Memory:
        """M_i of M_{i-1} and sigma^i; a memory that would pass its budget is compressed first."""
        reading = self.reading
        if reading.memory == "budgeted" and reading.budget is not None:
            rows = over(memory, kept, reading.budget)
            if bool(rows.any()):
                memory = self.condensed(memory, rows)
        return grown(memory, kept, tokens, reading)

    def condensed(self, memory: Memory, rows: Bool[Tensor, " B"]) -> Memory:
        """Eq. VL27: one pass over [M_{i-1}; summary tokens] without text, whose K vectors replace M_{i-1} in `rows`."""
        nothing = memory.live[:, :0]
        text, K = nothing.long(), self.reading.fixed
        written = self.write(memory, text, nothing, K)
        there = torch.ones(memory.B, K, dtype=torch.bool, device=rows.device)
        return memory.condensed(self.summaries.vectors(written.states), there, rows)
