"""Every command and program of the guides runs, with the packaged story model in place of SmolLM2."""

from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.house.guides import copy_stand_in, run_guide

GUIDES = sorted((REPO / "docs/guides").glob("*.md"))


def test_there_are_guides() -> None:
    assert [guide.stem for guide in GUIDES] == ["compress", "documents", "learn", "optimizers", "serve", "train"]


@pytest.mark.medium
@pytest.mark.loopback
@pytest.mark.parametrize(
    "guide",
    [pytest.param(path, marks=() if path.stem == "learn" else pytest.mark.slow, id=path.stem) for path in GUIDES],
)
def test_guide_runs(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_stand_in(tmp_path / "models/smollm2-135m-instruct")
    monkeypatch.setenv("LACONIC_MODELS", str(tmp_path / "models"))
    run_guide(guide, tmp_path, text_bytes=900 if guide.stem == "learn" else 2400)
