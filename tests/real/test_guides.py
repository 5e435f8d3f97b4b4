"""Every command and program of the guides runs on SmolLM2."""

from pathlib import Path

import pytest

from tests.house.guides import run_guide
from tests.house.test_guides import GUIDES

FEWER = {"train.steps=20": "train.steps=1", "--limit 20": "--limit 10"}


@pytest.mark.real
@pytest.mark.loopback
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize(
    "guide",
    [pytest.param(path, marks=pytest.mark.slow if path.stem == "train" else (), id=path.stem) for path in GUIDES],
)
def test_guide_runs_on_smollm2(guide: Path, tmp_path: Path) -> None:
    run_guide(guide, tmp_path, text_bytes=900, changes=FEWER)
