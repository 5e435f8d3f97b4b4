"""Rows of the papers' ablations that ask for a training of their own: each is a key of a recipe, and trains."""

import json
import sys
from pathlib import Path

import pytest

from laconic import cli
from tests.recipe.books import lay

pytestmark = pytest.mark.usefixtures("unchecked")
LARGER = (
    "model.num_hidden_layers=2", "memory.heads=2", "memory.head=4", "data.text.tokens=32", "data.text.segment=16",
    "train.steps=2",
)  # fmt: skip
TITANS = "memory.mixer=titans"
KEYS = [
    ["levels.eta=0.0"],  # without CMS
    ["levels.chunks=[8]"],
    ["levels.chunks=[4, 8, 16]"],
    ["levels.chunks=[16]"],  # lowest chunk
    ["levels.inner=task"],
    ["levels.structure=nested"],
    ["levels.structure=independent"],
    ["memory.self.erase=false"],  # without DGD
    ["memory.self.momentum=true", "memory.self.cap=0"],
    ["memory.self.keep_half_life=1e9", "memory.self.cap=0"],  # without decay
    ["memory.self.decay_to=zero"],
    ["memory.self.inner=[]"],
    *[[f"memory.self.inner={list(rest)}".replace("'", '"')] for rest in (
        ("v", "step", "keep"), ("k", "step", "keep"), ("k", "v"))],
    ["memory.self.inner_query=true"],
    ["memory.self.memory=mlp"],
    ["memory.self.objective=l2", "memory.self.groups=1", "memory.self.read=boundary"],
    ["memory.mixer=attention"],
    [TITANS, "memory.titans.momentum=false"],
    [TITANS, "memory.titans.depth=1"],
    [TITANS, "memory.titans.conv=1"],
    [TITANS, "memory.titans.persistent=2"],
    ["learning.learn=false"],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("keys", KEYS, ids=" ".join)
def test_a_row_of_an_ablation_trains(keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["laconic", "train", "books.toml", "--out", "x", *LARGER, *keys])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    lines = [json.loads(line) for line in Path("x/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert all(line["grad_norm"] > 0 and line["loss"] < 8 for line in lines if "loss" in line)
