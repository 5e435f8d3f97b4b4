"""A compression at inference: how many vectors are kept, by a rule on the stop head, by number, or softly all.

Rows stop each for itself and are latched; places behind a row's stop are dead. B rows, T columns of text, K places.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from laconic.core.errors import Usage
from laconic.core.memory import Memory
from laconic.methods.halting import Index, allowed_logits, first, fixed, gate, hit, over, passed
from laconic.methods.policies import Kept
from laconic.methods.segments import Written
from laconic.methods.units import Unit

RULES = ("quantile", "threshold", "sample")
Stop = Literal["quantile", "threshold", "sample", "fixed", "ratio", "soft"]


class Stopping(NamedTuple):
    """How many vectors a compression keeps: by a rule on the stop head, `n` for all, the classifier's, or softly all.

    `draws` [B, K] are uniform in [0, 1), for sample.
    """

    stop: Stop
    q: float = 0.5
    tau: float = 0.5
    n: int | None = None
    draws: Tensor | None = None


def default(unit: Unit) -> Stopping:
    """The lengths that a compression has where nothing else is asked for."""
    how, length = unit.summaries.halting, unit.reading.length
    if length == "stop" and how is not None:
        return Stopping(how.stop, how.q, how.tau)
    return Stopping("ratio") if length == "ratio" else Stopping("fixed", n=unit.reading.fixed)


def check(unit: Unit, how: Stopping) -> None:
    """Raises `Usage` (2) for a way to stop that a model has not learned, or numbers that cannot be meant."""
    length, K = unit.reading.length, unit.reading.fixed
    if (how.stop in (*RULES, "soft") and length != "stop") or (how.stop == "ratio" and length != "ratio"):
        raise Usage(f'stop "{how.stop}": lengths of this model are of kind "{length}"; ask for a number of vectors')
    if how.stop == "fixed" and length == "fixed" and how.n is not None and how.n < K:
        raise Usage(f"n {how.n}: this model writes {K} vectors a segment; crop the memory, or take lengths nested")
    if how.stop == "sample" and how.draws is None:
        raise Usage('stop "sample" without draws: give uniform numbers [B, K]')
    for name, value in (("q", how.q), ("tau", how.tau)):
        if not 0 < value < 1:
            raise Usage(f"{name} {value}: give a probability between 0 and 1, neither of them")


def compress(unit: Unit, memory: Memory, text: Int[Tensor, "B T"], live: Bool[Tensor, "B T"], how: Stopping) -> Memory:
    """One segment more in a memory; a row without live tokens keeps what it has, and takes part in no pass."""
    check(unit, how)
    unit.check(memory, text.shape[1])
    n = unit.reading.fixed if how.n is None else fixed(how.n, unit.reading.lengths)
    rows, before = live.any(1), memory
    if not bool(rows.all()) and bool(rows.any()):
        before, text, live = replace(memory, provenance=None).take(rows.nonzero()[:, 0]), text[rows], live[rows]
        how = how._replace(draws=None if how.draws is None else how.draws[rows])
    done = partial(stopped, unit, live.any(1), how) if how.stop in RULES else None
    found = kept(unit, unit.write(before.pack(), text, live, n, done=done), live, how, n)
    tokens = torch.zeros_like(rows, dtype=torch.long).masked_scatter(rows, live.sum(1))
    return unit.after(memory, found if len(live) == len(rows) else spread(found, rows), tokens)


def spread(found: Kept, rows: Bool[Tensor, " B"]) -> Kept:
    """What some rows keep, among all rows, of which the others keep nothing."""
    log_s = None if found.log_s is None else among(found.log_s, rows)
    return Kept(among(found.vectors, rows), among(found.live, rows), log_s)


def among(x: Shaped[Tensor, "R *rest"], rows: Bool[Tensor, " B"]) -> Shaped[Tensor, "B *rest"]:
    """What belongs to some rows, among all rows; 0 for the others."""
    return x.new_zeros(len(rows), *x.shape[1:]).index_copy(0, rows.nonzero()[:, 0], x)


def kept(unit: Unit, written: Written, live: Bool[Tensor, "B T"], how: Stopping, n: int) -> Kept:
    """The vectors that a way to stop keeps."""
    if how.stop == "fixed":
        return unit.kept(written, live, torch.full_like(live[:, 0], n, dtype=torch.long))
    if how.stop == "ratio":
        lengths = torch.tensor(unit.reading.lengths, device=live.device)
        return unit.kept(written, live, lengths[unit.summaries.ratios(written.first).argmax(1)])
    a = logits(unit, written.states)
    if how.stop == "soft":
        there = torch.ones_like(a, dtype=torch.bool) & live.any(1, keepdim=True)
        return Kept(unit.summaries.vectors(written.states), there, gate(a, index(unit)).float())
    return unit.kept(written, live, first(stops(a, how), index(unit)))


def index(unit: Unit) -> Index:
    """What a stop keeps."""
    return "after" if unit.summaries.halting is None else unit.summaries.halting.index


def logits(unit: Unit, z: Float[Tensor, "B t D"]) -> Float[Tensor, "B t"]:
    """Stop logits at the first places of a compression, minus infinity where no stop is allowed."""
    a, t = unit.summaries.stops(unit.decoder, z), z.shape[1]
    whole = F.pad(a, (0, unit.reading.fixed - t))
    return allowed_logits(whole, unit.reading.lengths, index(unit))[:, :t]


def stops(a: Float[Tensor, "B t"], how: Stopping) -> Bool[Tensor, "B t"]:
    """Place by place, where a rule would stop."""
    if how.draws is not None and how.stop == "sample":
        return hit(a, how.draws[:, : a.shape[1]])
    return passed(a, how.q) if how.stop == "quantile" else over(a, how.tau)


def stopped(unit: Unit, rows: Bool[Tensor, " B"], how: Stopping, z: Float[Tensor, "B t D"]) -> bool:
    """Whether every one of the rows has stopped, so that no more places are needed."""
    return bool((stops(logits(unit, z), how).any(1) | ~rows).all())
