"""AutoCompressors: a model reads a long text segment by segment, and keeps of each a few vectors that it reads back.

AutoCompressors arXiv:2305.14788 (code 80352a4), fixed numbers of vectors; with learned numbers its variable-length
variant (jo100sun/AutoCompressors bb15bc1), whose law and estimators stand in halting.py and estimators.py.

Symbols: S_i segment i; M_i memory after it; sigma^i its vectors, N_i of them; CE_i nats of segment i; beta nats a
vector costs, omega how much of that counts yet. B rows, T columns of text, M slots, K places, w segments of a window,
D width.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from laconic.core.answering import quiet
from laconic.core.contract import UNSCORED, Documents, Step, followers
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.memory import Memory
from laconic.methods import stopping
from laconic.methods.estimators import Price, entropy, ramp, target_price
from laconic.methods.halting import Draw, expected
from laconic.methods.objective import counted, learned
from laconic.methods.policies import most
from laconic.methods.segments import Prompt, positions_of, prompt
from laconic.methods.settings import Halting, Reading
from laconic.methods.stopping import Stopping
from laconic.methods.summaries import NONE, Summaries
from laconic.methods.units import Unit
from laconic.methods.windows import Course, Phase

SOFT = ("soft", "straight")


class AutoCompressor(nn.Module):
    """Reading with a memory, whole: what it is trained by, and compressing and reading a segment.

    `steps` are the updates of the run, by which price and head begin. `bos` is the id that prompts begin with where
    the settings ask for one; `base` a context in which the decoder reads without its adapter, for adapt write.
    """

    def __init__(
        self,
        decoder: Decoder,
        summaries: Summaries,
        reading: Reading,
        halting: Halting | None = None,
        *,
        steps: int,
        seed: int = 0,
        bos: int | None = None,
        base: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        super().__init__()
        check(decoder, reading, halting, bos, base is not None)
        self.decoder, self.summaries, self.reading, self.halting = decoder, summaries, reading, halting
        self.steps, self.seed = steps, seed
        self.unit = Unit(decoder, summaries, bos, base)

    def phase(self, step: int) -> Phase:
        """What learns at an update: the decoder on given lengths, both, or the head alone."""
        if self.halting is None or self.reading.length not in ("stop", "ratio"):
            return "lengths"
        if self.halting.joint or self.halting.estimator in ("soft", "straight"):
            return "both"
        return "head" if step >= self.alone else "lengths"

    @property
    def alone(self) -> int:
        """The update from which the head learns alone, where it does not learn with the decoder."""
        return math.ceil((0.0 if self.halting is None else self.halting.head_after) * self.steps)

    def restarts(self, batch: Documents) -> bool:
        """At the update where the head begins to learn alone."""
        return self.phase(batch.step) == "head" and batch.step == self.alone

    def totals(self, batch: Documents) -> dict[str, float]:
        """Rows; scored tokens, in all and by the place of a segment in its window; compressions that are priced."""
        phase = self.phase(batch.step)
        found: dict[str, float] = {"rows": float(batch.B), "scored": 0.0, "compressions": 0.0}
        found |= {f"scored.{i + 1}": 0.0 for i in range(batch.windows[0])}
        for piece in batch.pieces:
            course = Course(self.unit, piece, self.unit.empty(batch.B), phase, self.seed, "length")
            for i, columns in enumerate(piece.segments):
                n = float((course.targets[:, columns] != UNSCORED).sum())
                found["scored"] += n
                found[f"scored.{i + 1}"] += n
            found["compressions"] += float(counted(course).sum())
        return found

    def forward(self, batch: Documents, state: Memory | None = None) -> Step:
        """Loss and parts of a window; `state` is the memory that enters it, the step's the one handed on.

        Raises `Usage` (2) for windows in which nothing reads a summary, and for segments that do not fit the model.
        """
        self.check_window(batch)
        memory = self.unit.empty(batch.B) if state is None else state
        phase, how = self.phase(batch.step), self.halting
        twice = how is not None and phase != "lengths" and how.estimator == "sample" and how.baseline == "draws"
        streams: tuple[Draw, ...] = ("length", "second") if twice and self.reading.length == "stop" else ("length",)
        courses = [Course(self.unit, batch, memory, phase, self.seed, stream).run() for stream in streams]
        sums = batch.totals or self.totals(batch)
        weight = self.weight(courses[0], sums).to(courses[0].all_nats.dtype)
        loss = torch.stack([(c.all_nats.sum(1) * weight).sum() for c in courses]).mean()
        if phase != "lengths" and how is not None:
            omega = 1.0 if phase == "head" else ramp(batch.step, self.steps, how.penalty_start, how.penalty_ramp)
            extra = learned(courses, how, float(self.summaries.steered[0]), omega, weight, sums)
            loss = loss + extra + self.summaries.anchor
        return Step(loss, self.parts(courses[0], sums), self.handed(courses[0], memory))

    def check_window(self, batch: Documents) -> None:
        """Raises `Usage` (2) for a window of one segment, one that is several, and a kernel that has no gate."""
        w, n = batch.windows[0], len(batch.cuts)
        if w < 2:
            raise Usage(
                f"window: {w} leaves no segment that reads a summary inside its own window, so nothing would learn to "
                "compress; use 2 or more"
            )
        if n > w:
            raise Usage(f"window: {n} segments where windows are of {w}; give the pieces of a batch one after another")
        gated = self.reading.generator == "select" or (
            self.phase(batch.step) == "both" and self.halting is not None and self.halting.estimator in SOFT
        )
        if gated and self.decoder.attention == "flex":
            raise Usage('attention "flex": this kernel has no gradient for a bias, so a gate cannot learn; take sdpa')

    def weight(self, course: Course, sums: Mapping[str, float]) -> Float[Tensor, " B"]:
        """What a nat of each row counts in the loss: by tokens of the step, or by windows and their tokens."""
        n = (course.targets != UNSCORED).sum(1)
        if self.reading.normalise == "token":
            return torch.full_like(n, 1 / (sums["scored"] or 1.0), dtype=torch.float64)
        return (n > 0) / (n.clamp(min=1).double() * (sums["rows"] or 1.0))

    def parts(self, course: Course, sums: Mapping[str, float]) -> dict[str, Tensor]:
        """Nats and right answers per scored token, nats by the place of a segment in its window, and lengths."""
        tokens, rows = sums["scored"] or 1.0, sums["compressions"] or 1.0
        nats, here = course.all_nats.detach(), counted(course)
        found = {"nats": nats.sum() / tokens, "right": torch.stack(course.right).sum() / tokens}
        for i in range(course.batch.windows[0]):
            own = nats[:, i].sum() if i < course.w else nats.new_zeros(())
            found[f"nats.{i + 1}"] = own / (sums[f"scored.{i + 1}"] or 1.0)
        hard = course.hard.masked_fill(~here, 0)
        found["length"] = hard.sum() / rows
        if self.halting is None or self.reading.length != "stop" or self.phase(course.batch.step) == "lengths":
            return found
        index = self.halting.index
        for name, function in (("expected", expected), ("entropy", entropy)):
            each = course.each(partial(function, index=index)).detach()
            found[name] = each.masked_fill(~here, 0.0).sum() / rows
        found["at_1"] = ((hard == 1) & here).sum() / rows
        found["at_K"] = ((hard == self.reading.fixed) & here).sum() / rows
        found["price"] = self.summaries.steered[0].float() * here.sum() / rows
        return found

    def handed(self, course: Course, before: Memory) -> Memory | None:
        """The memory for the next window: soft where lengths are, unless it is to be hard."""
        state = course.state
        if state is None or state.log_s is None:
            return state
        if not self.soft:
            return replace(state, log_s=None)
        if self.reading.carry != "hard":
            return state
        lengths = torch.cat([before.block_lengths, course.hard[:, : state.blocks - before.blocks]], 1)
        return state.harden(lengths)

    @property
    def soft(self) -> bool:
        """Whether lengths are soft while they are learned."""
        return self.reading.length == "stop" and self.halting is not None and self.halting.estimator == "soft"

    def steer(self, numbers: Mapping[str, float]) -> None:
        """After an optimizer step with these numbers: the price is moved where the settings say so."""
        if self.halting is None or self.halting.target is None or "expected" not in numbers:
            return
        beta, mean = float(self.summaries.steered[0]), float(self.summaries.steered[1])
        held = Price(beta, None if mean == NONE else mean)
        moved = target_price(held, numbers["expected"], self.halting.target, self.halting.eta, self.halting.price_max)
        self.summaries.steered.copy_(torch.tensor([moved.beta, moved.mean], dtype=torch.float64))

    def compress(
        self,
        text: Int[Tensor, "B T"],
        live: Bool[Tensor, "B T"] | None = None,
        memory: Memory | None = None,
        how: Stopping | None = None,
    ) -> Memory:
        """One segment more in a memory, without gradients; a row without live tokens keeps what it has.

        Raises `Usage` (2) for a way to stop that was not learned, a length not allowed, and what does not fit.
        """
        live = torch.ones_like(text, dtype=torch.bool) if live is None else live
        memory = self.unit.empty(len(text)) if memory is None else memory
        with quiet(self):
            return stopping.compress(self.unit, memory, text, live, how or stopping.default(self.unit))

    def read(
        self, text: Int[Tensor, "B T"], live: Bool[Tensor, "B T"] | None = None, memory: Memory | None = None
    ) -> Float[Tensor, "B T D"]:
        """States of a text that follows a memory, after the final norm; `decoder.logits` makes words of them."""
        live = torch.ones_like(text, dtype=torch.bool) if live is None else live
        memory = self.unit.empty(len(text)) if memory is None else memory
        self.unit.check(memory, text.shape[1], writes=False)
        return self.unit.read(memory, text, live)

    def nats(
        self,
        text: Int[Tensor, "B T"],
        live: Bool[Tensor, "B T"],
        scored: Bool[Tensor, "B T"],
        memory: Memory | None = None,
    ) -> Float[Tensor, " B"]:
        """Summed cross-entropy of the scored tokens of each row, each predicted by the live token before it."""
        with quiet(self):
            return self.unit.nats(self.read(text, live, memory), followers(text, live, scored)).sum

    def prompt(self, memory: Memory) -> Prompt:
        """What stands before a text that is generated: read it once, and fork its cache."""
        return prompt(self.decoder, self.reading, memory, self.unit.bos)

    def most(self, segment: int) -> int | None:
        """How many segments of so many tokens can be compressed one after another; None: any number."""
        return most(self.decoder.config, self.reading, self.unit.lead, segment)


def check(decoder: Decoder, reading: Reading, halting: Halting | None, bos: int | None, base: bool) -> None:
    """Raises `Usage` (2) for settings that this decoder, or each other, cannot be meant with."""
    positions_of(reading, decoder.config)
    if reading.adapt == "write" and not base:
        raise Usage('adapt "write": the decoder has no adapter that could write alone; train with lora')
    if reading.bos in ("first", "sink") and bos is None:
        raise Usage(f'bos "{reading.bos}": the tokenizer has no such token; take none')
    if reading.memory == "budgeted" and reading.generator in ("pool", "select"):
        raise Usage(
            f'memory "budgeted" with generator "{reading.generator}": a memory is compressed without text, and its '
            'vectors are made of text; take "fifo"'
        )
    need = {"budgeted": 2 * reading.fixed, "fifo": reading.fixed}.get(reading.memory, 0)
    if reading.budget is not None and reading.budget < need:
        raise Usage(f'budget {reading.budget}: memory "{reading.memory}" needs room for {need} vectors; raise it')
    if reading.carry == "soft" and not (halting is not None and halting.estimator == "soft"):
        raise Usage('carry "soft": lengths are hard in training, and so is what is handed on; leave it out')
