"""Wrong decoders: each is caught at the stage where it acts and named as what it is; the right one passes.

The reference is the unmutated decoder; for some mutants it is transformers as well.
"""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laconic.core.decoder import Decoder
from laconic.verify.causes import likely
from laconic.verify.parity import Case, Comparison, Finding, Floors, compare, first_divergence, key, measure, replay, trace
from laconic.verify.reference import Transformers
from laconic.verify.run import default_run
from laconic.verify.traces import stream
from tests.conftest import needs
from tests.verify.angles import CHECKS
from tests.verify.mutants import MUTANTS, ROPE, Mutant, case, fixture, patched, spoiled

NAMES = [f"{m.group}: {m.name}" for m in MUTANTS]
BY_NAME = {m.name: m for m in MUTANTS}
FOREIGN = ("ε 1e-6 for 1e-5", "k one position off", "residual dropped", "bias sign", "dead slot live", "tied head not tied")


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


def found(mutant: Mutant, folder: Path) -> tuple[Finding | None, str]:
    """The first divergence and the likely cause, as a user would be told."""
    what, decoder = case(mutant.case), wrong_decoder(mutant, folder)
    there = reference(mutant.family, repr(mutant.changes), mutant.case)
    if mutant.kind == "low":
        assert compared(mutant, decoder, there, what)[0] is None, "float32 is right"
        decoder = fixture(mutant.family, **mutant.changes).to(torch.bfloat16)
        there = trace(decoder, what)
    return compared(mutant, decoder, there, what)


def compared(mutant: Mutant, decoder: Decoder, there: dict[str, Tensor], what: Case) -> tuple[Finding | None, str]:
    """With the mutant's functions in place, floors measured by the wrong decoder itself, as a user's run does."""
    with patched(mutant), torch.no_grad():
        low = decoder.words.weight.dtype != torch.float32
        floors = Floors(*(dict.fromkeys((at.partition("/")[0] for at in there), 1e-5) for _ in range(2)))
        comparison = Comparison(decoder, what, floors if low else measure(decoder, what))
        made = default_run(decoder, what)
        for told, own in zip(replay(there, what, decoder), stream(decoder, what), strict=True):
            comparison.add(told, own, default=None if low else made)
        evidence = comparison.evidence
        cause = "" if evidence is None else likely(replace(evidence, low=low))
        return first_divergence(comparison.findings()), cause


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_a_wrong_decoder_is_caught_where_it_is_wrong(mutant: Mutant, tmp_path: Path) -> None:
    seen, cause = found(mutant, tmp_path / "folder")
    assert seen is not None, "missed"
    assert (seen.stage, seen.layer) == (mutant.stage, mutant.layer), cause
    assert cause.startswith(mutant.cause), cause


@pytest.mark.parametrize(
    ("family", "changes", "kind"), sorted({(m.family, repr(m.changes), m.case) for m in MUTANTS}), ids=str
)
def test_the_right_decoder_passes(family: str, changes: str, kind: str) -> None:
    findings = compare(right(family, changes), reference(family, changes, kind), case(kind))
    assert first_divergence(findings) is None
    assert not [f for f in findings if f.verdict not in ("pass", "shown")]


@pytest.mark.parametrize("name", FOREIGN)
def test_transformers_as_the_reference_catches_it_too(name: str, tmp_path: Path) -> None:
    needs("transformers")
    mutant = BY_NAME[name]
    decoder, what = right(mutant.family, repr(mutant.changes)), case(mutant.case)
    decoder.save_pretrained(tmp_path / "saved")
    there: dict[str, Tensor] = {}
    for made in Transformers(tmp_path / "saved").stream(what):
        layer = made.layer if 0 <= made.layer < len(decoder.blocks) else None
        there |= {key(stage, layer): t for stage, t in made.stages.items() if stage != "x"}
    assert first_divergence(compare(decoder, there, what)) is None
    seen, cause = compared(mutant, spoiled(mutant, decoder), there, what)
    assert seen is not None
    assert (seen.stage, seen.layer) == (mutant.stage, mutant.layer)
    assert cause.startswith(mutant.cause)


MISSED_BY = {
    "q·k": {"position off by one", "start ignored", "reflection"},
    "position 0": {m.name for m in ROPE}
    - {"position off by one", "reflection", "sin and cos swapped", "attention factor where none is"},
    "properties": {
        "pairing", "negated angle", "wrong base", "exponent −i/E", "exponent −4i/E", "order of frequencies reversed",
        "half of the dims rotated", "start ignored",
    },
}  # fmt: skip


@pytest.mark.parametrize("mutant", ROPE, ids=[m.name for m in ROPE])
def test_golden_values_catch_every_wrong_rotation_and_weaker_checks_do_not(mutant: Mutant) -> None:
    with patched(mutant):
        caught = {name: check() for name, check in CHECKS.items()}
    assert caught == {"golden values": True} | {name: mutant.name not in missed for name, missed in MISSED_BY.items()}


def test_no_check_of_a_rotation_objects_to_the_right_one() -> None:
    assert not any(check() for check in CHECKS.values())
