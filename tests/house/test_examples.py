"""Every example runs and has fewer than 60 lines."""

from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.house.source import sandbox
from tests.house.warm import python

EXAMPLES = sorted((REPO / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


LONG = {"adapter.py", "dgd.py", "hf_trainer.py", "m3.py"}  # these train for some seconds


@pytest.mark.medium
@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=pytest.mark.slow if path.name in LONG else (), id=path.name) for path in EXAMPLES],
)
def test_example_is_short_and_runs(example: Path, tmp_path: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    inside = sandbox(tmp_path, wants_shared="shared" in text or "LACONIC_DATA" in text)
    done = python(f"examples/{example.name}", inside)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
