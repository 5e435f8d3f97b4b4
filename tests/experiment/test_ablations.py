"""Rows of the papers' ablations that require training: each is a recipe key, and trains."""

import json
from pathlib import Path

import pytest

from tests.conftest import call_cli
from tests.experiment.books import write_books

pytestmark = pytest.mark.usefixtures("unchecked")
LARGER = (
    "model.num_hidden_layers=2",
    "mixer.num_heads=2",
    "mixer.head_dim=4",
    "data.text.row_tokens=32",
    "data.text.segment_tokens=16",
    "train.steps=2",
)
TITANS = "mixer.kind=titans"
KEYS = [
    ["cms.inner_lr=0.0"],  # without CMS
    ["cms.chunk_sizes=[8]"],
    ["cms.chunk_sizes=[4, 8, 16]"],
    ["cms.chunk_sizes=[16]"],  # lowest chunk
    ["cms.inner_objective=task"],
    ["cms.structure=nested"],
    ["cms.structure=independent"],
    ["mixer.self_modifying.delta_rule=false"],  # without DGD
    ["mixer.self_modifying.momentum=true", "mixer.self_modifying.max_projection_norm=0"],
    ["mixer.self_modifying.decay_half_life=1e9", "mixer.self_modifying.max_projection_norm=0"],  # without decay
    ["mixer.self_modifying.decay_target=zero"],
    ["mixer.self_modifying.adaptive_projections=[]"],
    *[
        [f"mixer.self_modifying.adaptive_projections={list(rest)}".replace("'", '"')]
        for rest in (("v", "step", "keep"), ("k", "step", "keep"), ("k", "v"))
    ],
    ["mixer.self_modifying.adaptive_query=true"],
    ["mixer.self_modifying.memory_kind=mlp"],
    [
        "mixer.self_modifying.objective=l2",
        "mixer.self_modifying.gate_groups=1",
        "mixer.self_modifying.read_at=boundary",
    ],
    ["mixer.kind=attention"],
    [TITANS, "mixer.titans.momentum=false"],
    [TITANS, "mixer.titans.memory_depth=1"],
    [TITANS, "mixer.titans.conv_kernel_size=1"],
    [TITANS, "mixer.titans.num_persistent_tokens=2"],
    ["inner_loop.enabled=false"],
]


@pytest.mark.slow
@pytest.mark.parametrize("keys", KEYS, ids=" ".join)
def test_train_ablation(keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_books(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert call_cli("train", "books.toml", "--out", "x", *LARGER, *keys) == 0
    lines = [json.loads(line) for line in Path("x/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert all(line["grad_norm"] > 0 and line["loss"] < 8 for line in lines if "loss" in line)
