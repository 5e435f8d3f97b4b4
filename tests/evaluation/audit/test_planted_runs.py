"""Runs that need their thoughts and runs that do not, planted by construction, are told apart."""

from pathlib import Path

import pytest

from tests.evaluation.audit.planted import audit_in_memory, plant_run


def check_verdicts(folder: Path, seeds: range) -> None:
    for seed in seeds:
        needing = audit_in_memory(plant_run(folder / f"needs-{seed}", seed, needs_thoughts=True))
        assert needing.verdict.name == "used", (seed, needing.verdict)
        other = audit_in_memory(plant_run(folder / f"nothing-{seed}", seed, needs_thoughts=False))
        assert other.verdict.name in ("not shown", "presence"), (seed, other.verdict)
        assert (other.swaps[0].changed_share > 0.1) == (seed % 4 != 0)  # some are disturbed by other thoughts


@pytest.mark.medium
@pytest.mark.usefixtures("unchecked")
def test_audit_tells_planted_runs_apart(tmp_path: Path) -> None:
    check_verdicts(tmp_path, range(4, 6))


@pytest.mark.slow
def test_audit_tells_forty_planted_runs_apart(tmp_path: Path) -> None:
    check_verdicts(tmp_path, range(20))
