"""Texts of any length compressed side by side, a segment of each at a time; of a memory all vectors are held."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from laconic.core.errors import Usage
from laconic.core.memory import Memory
from laconic.core.provenance import Document
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.halting import draws
from laconic.methods.stopping import Stop, Stopping, default
from laconic.recipe.going import Going, Grid


@dataclass(frozen=True)
class Lengths:
    """How many vectors a segment becomes: by a stop's rule, `n` of each, or a `budget` shared out over a whole text.

    `seed` is of the draws of stop sample, which depend on it, the text's number and the segment's alone.
    """

    stop: Stop
    q: float = 0.5
    tau: float = 0.5
    n: int | None = None
    budget: int | None = None
    seed: int = 0


def lengths(
    method: AutoCompressor,
    *,
    stop: Stop | None = None,
    q: float | None = None,
    tau: float | None = None,
    n: int | None = None,
    budget: int | None = None,
    seed: int = 0,
) -> Lengths:
    """What was asked, and where nothing was what the run's own settings say.

    Raises `Usage` (2) for two answers to one question; what a model has not learned is refused when it compresses.
    """
    asked = {"stop": stop, "n": n, "budget": budget, "q": q, "tau": tau}
    given = [name for name, value in asked.items() if value is not None]
    rules = {"quantile": ["q"], "threshold": ["tau"]}.get(str(stop), [])
    if len(given) > 1 and given != ["stop", *rules]:
        raise Usage(f"{' and '.join(given)} given; one of them says how many vectors a segment becomes")
    own = default(method.unit)
    if n is not None:
        return Lengths("fixed", n=n)
    if budget is not None:
        if budget < 1:
            raise Usage(f"budget {budget}: give 1 vector or more")
        return Lengths("soft", budget=budget)
    rule = stop or ("quantile" if q is not None else "threshold" if tau is not None else own.stop)
    return Lengths(rule, own.q if q is None else q, own.tau if tau is None else tau, own.n, seed=seed)


class Compression(Going[Memory]):
    """Texts on their way to vectors, a segment at a time; `spent` positions went through the decoder."""

    kind = "compressing"  # "compression" was of another form
    counts = (*Going.counts, "spent")

    def __init__(self, method: AutoCompressor, how: Lengths) -> None:
        super().__init__(method.decoder.words.weight.device)
        self.method, self.how, self.spent = method, how, 0

    @property
    def documents(self) -> list[tuple[Document, ...]]:
        """What each row that is done stands for."""
        return [(text.document,) for text in self.texts]

    @torch.no_grad()
    def advanced(self, segment: Grid) -> Memory:
        """The memory after one more segment of every text that still has one."""
        B, method = len(segment.text), self.method
        tokens = segment.live.sum(1)
        before = method.unit.empty(B) if self.now is None else self.now
        after = method.compress(segment.text, segment.live, before, self.stopping(B))
        self.tokens += int(tokens.sum())
        self.spent += int((self.positions(before, after) + tokens)[tokens > 0].sum())
        return after

    def positions(self, before: Memory, after: Memory) -> Int[Tensor, " B"]:
        """Positions beside the text's own that compressing a segment put through the decoder, of each row."""
        reading, N = self.method.reading, after.block_lengths[:, -1]
        none, loop = torch.zeros_like(N), reading.generator == "self"
        lead = none + self.method.unit.lead * (reading.bos == "sink") + (before.tokens == 0) * (reading.bos == "first")
        before_text = lead + (before.lengths if reading.recurrent else none)
        behind = N if loop else none + (self.how.n or reading.fixed) * (reading.generator == "parallel")
        trigger = int(loop and reading.trigger == "insert")
        found = before_text + behind + trigger
        if reading.memory == "budgeted" and reading.budget is not None:
            condensed = (before.lengths > 0) & (before.lengths + N > reading.budget)
            found = found + condensed * (before_text + reading.fixed + trigger)
        return found

    def stopping(self, B: int) -> Stopping:
        """The rule of a segment, with its draws where there are any."""
        how, K, drawn = self.how, self.method.reading.fixed, None
        if how.stop == "sample":
            rows = torch.arange(B) + len(self.texts)
            drawn = draws("length", how.seed, 0, rows, self.piece - 1, K).to(self.device)
        return Stopping(how.stop, how.q, how.tau, how.n, drawn)

    def joined(self, before: Memory | None, done: Memory) -> Memory:
        """All rows, hard and of no more vectors than a budget says."""
        fitted = done if self.how.budget is None else done.fit(self.how.budget)
        hard = replace(fitted, log_s=None).pack()
        return hard if before is None else Memory.stack(before, hard)

    def apart(self, held: Memory, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        """By the names of its parts."""
        return {f"{prefix}{name}": x for name, x in held.tensors().items()}, None

    def built(self, form: Any, tensors: Mapping[str, Tensor], prefix: str) -> Memory:
        """From the parts that are there."""
        own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        return Memory(**{"log_s": None, **own}).to(self.device)
