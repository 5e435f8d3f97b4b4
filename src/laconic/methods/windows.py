"""A window run once: its segments read in order and compressed, each length decided, the nats of each segment.

B rows, w segments, K places; memory enters and leaves the window as a value.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.core.contract import UNSCORED, Documents
from laconic.core.memory import Memory
from laconic.methods.estimators import drawn, first_slots, mean_field, mixture, old, straight
from laconic.methods.halting import (
    Draw,
    allowed_logits,
    draws,
    log_probabilities,
    nested,
    quantile,
    support,
    threshold,
)
from laconic.methods.policies import Kept
from laconic.methods.segments import Written
from laconic.methods.units import Unit, untriggered

Phase = Literal["lengths", "both", "head"]


class Course:
    """One run over a window. `phase`: lengths are known or drawn evenly; head and decoder learn; the head alone.

    After `run`: `nats` and `right` of each segment and row; `a`, the stop logits, `first`, what the ratio head reads,
    and `hard`, lengths, of each compression; `trials`, nats of the segment after it read with every length in turn;
    `log_p` and `weight` of the lengths drawn; `state`, the memory handed on.
    """

    def __init__(self, unit: Unit, batch: Documents, memory: Memory, phase: Phase, seed: int, stream: Draw) -> None:
        self.unit, self.batch, self.memory, self.phase = unit, batch, memory, phase
        self.seed, self.reading, self.how = seed, unit.reading, unit.summaries.halting
        self.stream: Draw = stream
        self.w, self.state = len(batch.cuts), None if batch.handed is None else memory
        self.tokens = torch.stack([batch.live[:, s].sum(1) for s in batch.segments], 1)
        zero = torch.zeros(batch.B, self.w, device=batch.live.device)
        self.hard, self.old = zero.long(), zero.clone()
        self.nats: list[Tensor] = []
        self.right: list[Tensor] = []
        self.a: list[Tensor | None] = [None] * self.w
        self.first: list[Tensor | None] = [None] * self.w
        self.trials: list[Tensor | None] = [None] * self.w
        self.log_p: list[Tensor] = [zero[:, 0]] * self.w
        self.weight: list[Tensor] = [zero[:, 0] + 1] * self.w
        self.read_hard = self.hardened()
        self.pending: tuple[Memory, Written, Tensor] | None = None
        self.targets = window_targets(unit, batch)
        self.scored = torch.stack([(self.targets[:, s] != UNSCORED).any(1) for s in batch.segments], 1)

    def run(self) -> "Course":
        """The segments in order."""
        targets = self.targets
        with torch.set_grad_enabled(self.phase != "head" and torch.is_grad_enabled()):
            for i, columns in enumerate(self.batch.segments):
                self.segment(i, self.batch.text[:, columns], self.batch.live[:, columns], targets[:, columns])
        return self

    def segment(self, i: int, text: Int[Tensor, "B T"], live: Bool[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> None:
        """Reads segment `i` after the memory so far, then compresses it if anybody needs that."""
        unit, handed = self.unit, self.batch.handed
        read_here, priced = i < self.w - 1, self.how is not None and self.how.penalise == "all"
        writes = read_here or (handed is not None and i < handed) or (priced and self.phase != "lengths")
        N = self.known(i)
        unit.check(self.memory, text.shape[1], writes=writes)
        hidden, written = unit.unit(self.memory, text, live, self.places(N) if writes else 0, read_here or priced)
        nats = unit.nats(hidden, targets)
        self.nats.append(nats.sum)
        self.right.append(nats.right)
        if self.pending is not None:
            self.trials[i - 1] = self.tried(*self.pending, text, live, targets)
        if written is None:
            return
        self.old[:, i], self.first[i] = old(self.memory.live, self.memory.log_s), written.first
        self.pending = (self.memory, written, self.batch.live[:, self.batch.segments[i]]) if self.tries(i) else None
        kept = self.decided(i, written, live) if N is None else unit.kept(written, live, N)
        if N is not None:
            self.hard[:, i] = kept.live.sum(1)
        memory = unit.after(self.memory, kept, self.tokens[:, i])
        self.memory = memory if read_here else memory.detach()
        if handed == i + 1:
            self.state = self.memory

    def key(self, what: Draw, i: int, n: int) -> Float[Tensor, "B n"]:
        """Draws of segment `i`, in the stream of this run where the lengths are a head's."""
        return draws(what, self.seed, self.batch.epoch, self.batch.index, self.batch.first + i, n)

    @property
    def all_nats(self) -> Float[Tensor, "B w"]:
        """Nats of each segment."""
        return torch.stack(self.nats, 1)

    def each(self, function: Callable[..., Tensor]) -> Float[Tensor, "B w"]:
        """`function` of the stop logits of each compression; 0 where there was none."""
        none = torch.zeros_like(self.old[:, 0])
        return torch.stack([none if a is None else function(a) for a in self.a], 1)

    def known(self, i: int) -> Int[Tensor, " B"] | None:
        """Lengths that nobody has to decide: kappa, or drawn evenly while decoder or classifier learn."""
        index, reading = self.batch.index, self.reading
        if reading.length == "fixed":
            return torch.full_like(index, reading.fixed)
        if reading.length == "stop" and self.phase != "lengths":
            return None
        return nested(self.key("nested", i, 1)[:, 0], reading.lengths)

    def places(self, N: Int[Tensor, " B"] | None) -> int:
        """Places of a compression: as many as are kept, all where a head or a trial looks at them."""
        loops = self.reading.generator in ("parallel", "self")
        return int(N.max()) if N is not None and loops and self.phase == "lengths" else self.reading.fixed

    def tries(self, i: int) -> bool:
        """Whether the next segment is read with every length of this one."""
        learns = self.how is not None and self.phase != "lengths" and i < self.w - 1
        return learns and (self.reading.length == "ratio" or (self.how is not None and self.how.estimator == "ponder"))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those that a length takes."""
        return support(self.reading.lengths, "after" if self.how is None else self.how.index)

    @torch.no_grad()
    def tried(
        self, memory: Memory, written: Written, live: Bool[Tensor, "B Ts"], text: Int[Tensor, "B T"],
        there: Bool[Tensor, "B T"], targets: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B A"]:  # fmt: skip
        """Nats of a segment read after each length of the one before it."""
        found: list[Tensor] = []
        for n in self.lengths:
            kept = self.unit.kept(written, live, torch.full_like(self.batch.index, n))
            after = self.unit.after(memory, kept, live.sum(1))
            found.append(self.unit.nats(self.unit.read(after, text, there), targets).sum)
        return torch.stack(found, 1)

    def decided(self, i: int, written: Written, live: Bool[Tensor, "B T"]) -> Kept:
        """The vectors as they are read in training: soft, or as many as the head's law gives by a draw."""
        unit, how = self.unit, self.how
        assert how is not None
        z, tokens = written.states, live.sum(1)
        with torch.enable_grad():  # the head learns where the decoder rests, too
            logits = unit.summaries.stops(unit.decoder, z, alone=self.phase == "head")
            a = allowed_logits(logits, self.reading.lengths, how.index)
            log_p = log_probabilities(a, how.index)
        self.a[i] = a
        p = mixture(a, how.explore if how.joint else 0.0, self.lengths, how.index).detach()
        column = drawn(p, self.key(self.stream, i, 1)[:, 0])
        N = column + (a.shape[1] + 1 - p.shape[1])
        with torch.enable_grad():
            self.log_p[i] = log_p.gather(1, column[:, None])[:, 0]
        self.weight[i] = self.log_p[i].detach().exp() / p.gather(1, column[:, None])[:, 0]
        self.hard[:, i] = self.ruled(a.detach(), N).masked_fill(tokens == 0, 0)
        vectors = unit.summaries.vectors(z)
        there = first_slots(N, a.shape[1]) & (tokens > 0)[:, None]
        if how.estimator in ("ponder", "sample"):
            return Kept(vectors, there)
        if how.estimator == "straight":
            slots = straight(a, N, how.index)
            return Kept(vectors, there, None if slots.log_s is None else slots.log_s.float())
        return self.soft(vectors, a, there, tokens > 0)

    def soft(
        self, vectors: Float[Tensor, "B K D"], a: Float[Tensor, "B K"], drawn: Bool[Tensor, "B K"],
        alive: Bool[Tensor, " B"],
    ) -> Kept:  # fmt: skip
        """All places by their survival; in windows that are read hard, those drawn."""
        assert self.how is not None
        slots, hard = mean_field(a, self.how.index), self.read_hard[:, None]
        assert slots.log_s is not None
        log_s = slots.log_s.masked_fill(hard, 0.0)
        live = torch.where(hard, drawn, slots.live & alive[:, None])
        return Kept(vectors, live, log_s.float())

    def ruled(self, a: Float[Tensor, "B K"], N: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Lengths by the rule of inference, as they are logged; N itself where that draws."""
        assert self.how is not None
        if self.how.stop == "sample":
            return N
        rule, at = (quantile, self.how.q) if self.how.stop == "quantile" else (threshold, self.how.tau)
        return rule(a, at, self.how.index)

    def hardened(self) -> Bool[Tensor, " B"]:
        """Rows that read this window hard although lengths are soft."""
        if self.how is None or self.how.estimator != "soft" or self.phase != "both":
            return torch.zeros_like(self.batch.index, dtype=torch.bool)
        return self.key("harden", 0, 1)[:, 0] < self.how.harden


def window_targets(unit: Unit, batch: Documents) -> Int[Tensor, "B T"]:
    """What each token of a window predicts."""
    targets = batch.targets
    if unit.reading.trigger == "replace":
        segments = [untriggered(targets[:, s], batch.live[:, s]) for s in batch.segments]
        return torch.cat(segments, 1)
    return targets
