"""Compare a mutated decoder with the right one: the first divergence, and the error at the logits."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.models.decoder import Decoder
from laconic.verification import traces
from laconic.verification.low_precision import ErrorRatios
from laconic.verification.parity import CaseComparison, ParityCase, StageResult, first_divergence
from laconic.verification.traces import LayerActivations, replay_stages, sharpened_queries
from tests.verification.mutants import MUTANTS, Mutant, build_case, build_decoder, mutate, patched


class Divergence(NamedTuple):
    """The first divergence that a user is shown, and the relative error of the logits."""

    first: StageResult | None
    logits_error: float


def trace_stages(decoder: Decoder, case: ParityCase) -> dict[str, Tensor]:
    """Run a case with eager attention, with its scale of the queries; return every activation by key."""
    with sharpened_queries(decoder, case.query_scale):
        return traces.trace_stages(decoder, case)


def compare_stages(
    decoder: Decoder, reference: Mapping[str, Tensor], case: ParityCase, *, with_default_backend: bool = False
) -> list[StageResult]:
    """Compare every stage of a case with a reference's activations by key."""
    stages = replay_stages(reference, case, len(decoder.layers))
    return CaseComparison(decoder, case).run(stages, with_default_backend=with_default_backend)


@functools.cache
def right_decoder(family: str, config_changes: str) -> Decoder:
    changes = next(m.config_changes for m in MUTANTS if (m.family, repr(m.config_changes)) == (family, config_changes))
    return build_decoder(family, **changes)


@functools.cache
def reference_stages(family: str, config_changes: str, kind: str) -> dict[str, Tensor]:
    """The activations of the right decoder on an input."""
    return trace_stages(right_decoder(family, config_changes), build_case(kind))


def mutated_decoder(mutant: Mutant, folder: Path) -> Decoder:
    """The mutated decoder; saved and loaded if the mutation is in the loader."""
    decoder = right_decoder(mutant.family, repr(mutant.config_changes))
    if not mutant.is_in_loader:
        return mutate(mutant, decoder)
    decoder.save_pretrained(folder)
    with patched(mutant):
        return Decoder.from_pretrained(folder)


def find_divergence(mutant: Mutant, folder: Path) -> Divergence:
    """Compare a mutated decoder with the right one, as `laconic verify parity` does."""
    case, decoder = build_case(mutant.case), mutated_decoder(mutant, folder)
    reference = reference_stages(mutant.family, repr(mutant.config_changes), mutant.case)
    divergence = compare(mutant, decoder, reference, case)
    if mutant.kind == "low":
        assert divergence.first is None, "float32 must pass"
        return compare_bfloat16(mutant, case)
    return divergence


def compare(mutant: Mutant, decoder: Decoder, reference: dict[str, Tensor], case: ParityCase) -> Divergence:
    """Compare with the mutant's functions patched in; the mutated decoder also measures its own floors."""
    with patched(mutant), torch.no_grad():
        results = compare_stages(decoder, reference, case, with_default_backend=True)
        logits = max(r.error for r in results if r.stage == "logits" and r.kind in ("propagated", "backend"))
        return Divergence(first_divergence(results), logits)


@dataclass
class RecordedReference:
    """A reference that repeats recorded activations."""

    decoder: Decoder
    stages: dict[str, Tensor]

    def iterate_stages(self, case: ParityCase) -> Iterator[LayerActivations]:
        return replay_stages(self.stages, case, len(self.decoder.layers))


def compare_bfloat16(mutant: Mutant, case: ParityCase) -> Divergence:
    """Compare in bfloat16 with the right decoder's activations in bfloat16."""
    decoder = build_decoder(mutant.family, **mutant.config_changes).to(torch.bfloat16)
    reference = RecordedReference(decoder, trace_stages(decoder, case))
    right, mutated = ErrorRatios(decoder), ErrorRatios(decoder)
    right.add_case(case, reference)
    assert not [result for result in right.results() if result.verdict == "fail"]
    expected = reference.stages["logits"]
    with patched(mutant), torch.no_grad():
        mutated.add_case(case, reference)
        logits = decoder(case.embed(decoder), capture=("logits",)).activations["logits"]
    return Divergence(first_divergence(mutated.results()), float((logits - expected).norm() / expected.norm()))
