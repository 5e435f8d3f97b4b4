"""A wrong decoder beside the right one: the first divergence, the likely cause, the error at the logits."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.core.decoder import Decoder
from laconic.verify.causes import likely
from laconic.verify.low import Ratios
from laconic.verify.parity import Case, Comparison, Finding, first_divergence, measure, replay, trace
from laconic.verify.run import default_run
from laconic.verify.traces import Made, stream
from tests.verify.mutants import MUTANTS, Mutant, case, fixture, patched, spoiled


class Caught(NamedTuple):
    """What a user is told of a wrong decoder, and how far its logits are from the right ones."""

    first: Finding | None
    cause: str
    logits: float


@functools.cache
def right(family: str, changes: str) -> Decoder:
    return fixture(family, **next(m.changes for m in MUTANTS if (m.family, repr(m.changes)) == (family, changes)))


@functools.cache
def reference(family: str, changes: str, kind: str) -> dict[str, Tensor]:
    """What the right decoder makes of an input."""
    return trace(right(family, changes), case(kind))


def wrong_decoder(mutant: Mutant, folder: Path) -> Decoder:
    """Made from the right one; through a folder on disk where the mistake is the loader's."""
    decoder = right(mutant.family, repr(mutant.changes))
    if not mutant.loader:
        return spoiled(mutant, decoder)
    decoder.save_pretrained(folder)
    with patched(mutant):
        return Decoder.from_pretrained(folder)


def found(mutant: Mutant, folder: Path) -> Caught:
    """The first divergence and the likely cause, as a user would be told."""
    what, decoder = case(mutant.case), wrong_decoder(mutant, folder)
    there = reference(mutant.family, repr(mutant.changes), mutant.case)
    caught = compared(mutant, decoder, there, what)
    if mutant.kind == "low":
        assert caught.first is None, "float32 is right"
        return low(mutant, what)
    return caught


def compared(mutant: Mutant, decoder: Decoder, there: dict[str, Tensor], what: Case) -> Caught:
    """With the mutant's functions in place, floors measured by the wrong decoder itself, as a user's run does."""
    with patched(mutant), torch.no_grad():
        comparison = Comparison(decoder, what, measure(decoder, what))
        made = default_run(decoder, what)
        for told, own in zip(replay(there, what, decoder), stream(decoder, what), strict=True):
            comparison.add(told, own, default=made)
        evidence = comparison.evidence
        findings = comparison.findings()
        logits = max(f.error for f in findings if f.stage == "logits" and f.kind in ("propagated", "backend"))
        return Caught(first_divergence(findings), "" if evidence is None else likely(evidence), logits)


@dataclass
class Kept:
    """A reference that says again what the right decoder made."""

    decoder: Decoder
    made: dict[str, Tensor]

    def stream(self, what: Case) -> Iterator[Made]:
        return replay(self.made, what, self.decoder)


def low(mutant: Mutant, what: Case) -> Caught:
    """The same in bfloat16, against what the right decoder makes in bfloat16."""
    decoder = fixture(mutant.family, **mutant.changes).to(torch.bfloat16)
    kept = Kept(decoder, trace(decoder, what))
    right_one, wrong_one = Ratios(decoder), Ratios(decoder)
    right_one.add(what, kept)
    assert not [f for f in right_one.findings() if f.verdict == "fail"]
    with patched(mutant), torch.no_grad():
        wrong_one.add(what, kept)
        logits = float((decoder(what.read(decoder), want=("logits",)).stages["logits"] - kept.made["logits"]).norm())
    seen = first_divergence(wrong_one.findings())
    return Caught(seen, "" if seen is None else seen.note, logits / float(kept.made["logits"].norm()))
