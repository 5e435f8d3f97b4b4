"""Every command and program of three guides runs on SmolLM2; training on it takes minutes."""

from pathlib import Path

import pytest

from tests.house.guides import run_guide
from tests.house.test_guides import GUIDES


@pytest.mark.real
@pytest.mark.loopback
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize(
    "guide", [path for path in GUIDES if path.stem not in ("documents", "train")], ids=lambda path: path.stem
)
def test_guide_runs_on_smollm2(guide: Path, tmp_path: Path) -> None:
    run_guide(guide, tmp_path, text_bytes=600)
