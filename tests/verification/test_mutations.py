"""Mutated decoders: each is detected at the stage where it is wrong; the right decoder passes.

The reference is the right decoder; for some mutants transformers too.
"""

from pathlib import Path

import pytest
from torch import Tensor

from laconic.verification.hf_reference import TransformersReference
from laconic.verification.parity import first_divergence, stage_key
from tests.conftest import needs
from tests.verification.angles import CHECKS
from tests.verification.caught import compare, compare_stages, find_divergence, reference_stages, right_decoder
from tests.verification.mutants import MUTANTS, ROPE, Mutant, build_case, mutate, patched

PAGE = Path(__file__).parents[2] / "docs" / "mutations.md"
NAMES = [f"{m.group}: {m.name}" for m in MUTANTS]
BY_NAME = {m.name: m for m in MUTANTS}
WITH_TRANSFORMERS = (
    "ε 1e-6 for 1e-5",
    "k one position off",
    "residual dropped",
    "bias sign",
    "dead slot live",
    "tied head not tied",
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_mutations_first_divergence_is_the_mutated_stage(mutant: Mutant, tmp_path: Path) -> None:
    first = find_divergence(mutant, tmp_path / "folder").first
    assert first is not None, "missed"
    assert (first.stage, first.layer) == (mutant.stage, mutant.layer)


@pytest.mark.parametrize(
    ("family", "changes", "kind"), sorted({(m.family, repr(m.config_changes), m.case) for m in MUTANTS}), ids=str
)
def test_mutations_right_decoder_passes(family: str, changes: str, kind: str) -> None:
    results = compare_stages(right_decoder(family, changes), reference_stages(family, changes, kind), build_case(kind))
    assert first_divergence(results) is None
    assert not [result for result in results if result.verdict not in ("pass", "shown")]


@pytest.mark.parametrize("name", WITH_TRANSFORMERS)
def test_mutations_are_detected_against_transformers(name: str, tmp_path: Path) -> None:
    needs("transformers")
    mutant = BY_NAME[name]
    decoder, case = right_decoder(mutant.family, repr(mutant.config_changes)), build_case(mutant.case)
    decoder.save_pretrained(tmp_path / "saved")
    reference: dict[str, Tensor] = {}
    for recorded in TransformersReference(tmp_path / "saved").iterate_stages(case):
        layer = recorded.layer if 0 <= recorded.layer < len(decoder.layers) else None
        reference |= {stage_key(stage, layer): t for stage, t in recorded.activations.items() if stage != "x"}
    assert first_divergence(compare_stages(decoder, reference, case)) is None
    first = compare(mutant, mutate(mutant, decoder), reference, case).first
    assert first is not None
    assert (first.stage, first.layer) == (mutant.stage, mutant.layer)


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
def test_mutations_golden_values_detect_every_wrong_rotation(mutant: Mutant) -> None:
    """Weaker checks (products, position 0, properties) miss some; which ones is pinned."""
    with patched(mutant):
        detected = {name: check() for name, check in CHECKS.items()}
    expected = {name: mutant.name not in missed for name, missed in MISSED_BY.items()}
    assert detected == {"golden values": True} | expected


def test_mutations_rotation_checks_accept_the_right_rotation() -> None:
    assert not any(check() for check in CHECKS.values())


def test_mutations_page_lists_every_mutant(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-docs"):
        from benchmarks.mutations import write_page

        write_page(PAGE)
    page = PAGE.read_text(encoding="utf-8")
    for mutant in MUTANTS:
        layer = "" if mutant.layer is None else f".{mutant.layer}"
        assert f"| {mutant.name} | `{mutant.stage}{layer}` |" in page, mutant.name
