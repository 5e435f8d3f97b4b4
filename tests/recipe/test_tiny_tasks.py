"""What the small recipes of generated streams learn, beside the control whose fast weights stand still."""

import json
import sys
from pathlib import Path

import pytest

from laconic import cli


def right(folder: Path, monkeypatch: pytest.MonkeyPatch, *keys: str) -> float:
    """The share of targets told right in the last validation of a run."""
    monkeypatch.setattr(sys, "argv", ["laconic", "train", *keys, "--out", str(folder)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["validation"]["right"] for line in lines if "validation" in line][-1]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_parity_is_learned_by_what_learns_while_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert right(tmp_path / "learns", monkeypatch, "hope-tiny-parity") >= 0.99
    short = ("train.steps=600", "train.save_every=600", "train.validate_every=600")
    assert right(tmp_path / "still", monkeypatch, "hope-tiny-parity", *short, "learning.learn=false") <= 0.7


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_pairs_are_not_guessed_by_what_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("train.steps=700", "train.save_every=700", "train.validate_every=700")
    still = right(tmp_path / "still", monkeypatch, "hope-tiny-recall", *short, "learning.learn=false")
    assert still <= 0.1  # chance is one value in 32
    assert right(tmp_path / "learns", monkeypatch, "hope-tiny-recall", *short) >= still + 0.15
