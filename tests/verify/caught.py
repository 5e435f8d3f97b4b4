"""A wrong decoder beside the right one: the first divergence, the likely cause, the error at the logits."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.models.decoder import Decoder
from laconic.verification.causes import likely
from laconic.verification.low_precision import ErrorRatios
from laconic.verification.parity import (
    CaseComparison,
    ParityCase,
    StageResult,
    first_divergence,
    measure_floors,
    replay_stages,
    trace_stages,
)
from laconic.verification.run import run_default_backend
from laconic.verification.traces import LayerActivations, iterate_stages
from tests.verify.mutants import MUTANTS, Mutant, case, fixture, patched, spoiled


class Caught(NamedTuple):
    """What a user is told of a wrong decoder, and how far its logits are from the right ones."""

    first: StageResult | None
    cause: str
    logits: float


@functools.cache
def right(family: str, changes: str) -> Decoder:
    return fixture(family, **next(m.changes for m in MUTANTS if (m.family, repr(m.changes)) == (family, changes)))


@functools.cache
def reference(family: str, changes: str, kind: str) -> dict[str, Tensor]:
    """What the right decoder makes of an input."""
    return trace_stages(right(family, changes), case(kind))


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


def compared(mutant: Mutant, decoder: Decoder, there: dict[str, Tensor], what: ParityCase) -> Caught:
    """With the mutant's functions in place, floors measured by the wrong decoder itself, as a user's run does."""
    with patched(mutant), torch.no_grad():
        comparison = CaseComparison(decoder, what, measure_floors(decoder, what))
        made = run_default_backend(decoder, what)
        for told, own in zip(replay_stages(there, what, decoder), iterate_stages(decoder, what), strict=True):
            comparison.add_layer(told, own, default_backend=made)
        evidence = comparison.evidence
        findings = comparison.results()
        logits = max(f.error for f in findings if f.stage == "logits" and f.kind in ("propagated", "backend"))
        return Caught(first_divergence(findings), "" if evidence is None else likely(evidence), logits)


@dataclass
class Kept:
    """A reference that says again what the right decoder made."""

    decoder: Decoder
    made: dict[str, Tensor]

    def stream(self, what: ParityCase) -> Iterator[LayerActivations]:
        return replay_stages(self.made, what, self.decoder)


def low(mutant: Mutant, what: ParityCase) -> Caught:
    """The same in bfloat16, against what the right decoder makes in bfloat16."""
    decoder = fixture(mutant.family, **mutant.changes).to(torch.bfloat16)
    kept = Kept(decoder, trace_stages(decoder, what))
    right_one, wrong_one = ErrorRatios(decoder), ErrorRatios(decoder)
    right_one.add_case(what, kept)
    assert not [f for f in right_one.results() if f.verdict == "fail"]
    with patched(mutant), torch.no_grad():
        wrong_one.add_case(what, kept)
        logits = float(
            (decoder(what.embed(decoder), want=("logits",)).activations["logits"] - kept.made["logits"]).norm()
        )
    seen = first_divergence(wrong_one.results())
    return Caught(seen, "" if seen is None else seen.note, logits / float(kept.made["logits"].norm()))
