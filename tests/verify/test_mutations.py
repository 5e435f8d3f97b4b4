"""Wrong decoders: each is caught at the stage where it acts and named as what it is; the right one passes.

The reference is the unmutated decoder; for some mutants it is transformers as well.
"""

from pathlib import Path

import pytest
from torch import Tensor

from laconic.verification.hf_reference import TransformersReference
from laconic.verification.parity import compare_stages, first_divergence, stage_key
from tests.conftest import needs
from tests.verify.angles import CHECKS
from tests.verify.caught import compared, found, reference, right
from tests.verify.mutants import MUTANTS, ROPE, Mutant, case, patched, spoiled

PAGE = Path(__file__).parents[2] / "docs" / "mutations.md"
NAMES = [f"{m.group}: {m.name}" for m in MUTANTS]
BY_NAME = {m.name: m for m in MUTANTS}
FOREIGN = (
    "ε 1e-6 for 1e-5",
    "k one position off",
    "residual dropped",
    "bias sign",
    "dead slot live",
    "tied head not tied",
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_a_wrong_decoder_is_caught_where_it_is_wrong(mutant: Mutant, tmp_path: Path) -> None:
    seen, cause, _ = found(mutant, tmp_path / "folder")
    assert seen is not None, "missed"
    assert (seen.stage, seen.layer) == (mutant.stage, mutant.layer), cause
    assert cause.startswith(mutant.cause), cause


@pytest.mark.parametrize(
    ("family", "changes", "kind"), sorted({(m.family, repr(m.changes), m.case) for m in MUTANTS}), ids=str
)
def test_the_right_decoder_passes(family: str, changes: str, kind: str) -> None:
    findings = compare_stages(right(family, changes), reference(family, changes, kind), case(kind))
    assert first_divergence(findings) is None
    assert not [f for f in findings if f.verdict not in ("pass", "shown")]


@pytest.mark.parametrize("name", FOREIGN)
def test_transformers_as_the_reference_catches_it_too(name: str, tmp_path: Path) -> None:
    needs("transformers")
    mutant = BY_NAME[name]
    decoder, what = right(mutant.family, repr(mutant.changes)), case(mutant.case)
    decoder.save_pretrained(tmp_path / "saved")
    there: dict[str, Tensor] = {}
    for made in TransformersReference(tmp_path / "saved").iterate_stages(what):
        layer = made.layer if 0 <= made.layer < len(decoder.layers) else None
        there |= {stage_key(stage, layer): t for stage, t in made.activations.items() if stage != "x"}
    assert first_divergence(compare_stages(decoder, there, what)) is None
    seen, cause, _ = compared(mutant, spoiled(mutant, decoder), there, what)
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


def test_the_page_tells_every_mutant(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-docs"):
        from benchmarks.mutations import write

        write(PAGE)
    page = PAGE.read_text(encoding="utf-8")
    for mutant in MUTANTS:
        layer = "" if mutant.layer is None else f".{mutant.layer}"
        assert f"| {mutant.name} | `{mutant.stage}{layer}` | {mutant.cause}" in page, mutant.name
