"""Levels added to the model of a run, and export of nested models, by commands."""

import json
from pathlib import Path

import pytest
import torch

import laconic
from laconic.generation.config import GenerationConfig
from laconic.models.checkpoints import weights
from laconic.nested.hope.model import Hope
from tests.conftest import RunCli, check_refused
from tests.experiment.books import BOOKS_RECIPE

pytestmark = pytest.mark.usefixtures("unchecked")
GROWN = BOOKS_RECIPE.replace(
    'family = "llama"\ntokenizer = "bytes"\nhidden_size = 8\nnum_hidden_layers = 1\n',
    'name = "small/steps/step-000001"\n',
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, tmp_path: Path) -> RunCli:
    """Run a command in a directory with a small run and recipes."""
    rows = [{"book": f"b{b}", "text": f"Book {b}. " + "It stands here. " * 6} for b in range(4)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name, content in (("books.jsonl", text), ("books.toml", BOOKS_RECIPE), ("grown.toml", GROWN)):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert run_cli("train", "books.toml", "--out", "small", "cms.chunk_sizes=[4]").code == 0
    return run_cli


def test_train_adds_levels_from_run_to_run(run: RunCli) -> None:
    check_refused(run("train", "books.toml", "--out", "small", "cms.chunk_sizes=[4, 8]"), 2, "cms.chunk_sizes: [4]")
    assert run("train", "grown.toml", "--out", "grown").code == 0
    small, grown = (Hope.from_pretrained(f"{name}/steps/step-000001") for name in ("small", "grown"))
    assert (small.hope_config.chunk_sizes, grown.hope_config.chunk_sizes) == (((4,),), ((4, 8),))
    added = grown.get_parameter("model.layers.0.mlp.levels.1.down_proj.weight")
    assert 0 < added.abs().max() < 2e-3, "initialised to zero and trained for one step"
    assert run("train", "grown.toml", "--out", "bad", "cms.chunk_sizes=[8, 16]").code == 2


@pytest.mark.medium
def test_export_run_step_and_exported_folder(run: RunCli) -> None:
    assert run("export", "small", "--out", "a").code == 0
    assert run("export", "a", "--out", "b").code == 0
    assert run("export", "small/steps/step-000001", "--out", "c").code == 0
    assert run("export", "a", "--out", "half", "--dtype", "bfloat16").code == 0
    ids = torch.arange(40)[None]
    hidden_states = [Hope.from_pretrained(name).read_tokens(ids).hidden_states for name in ("a", "b", "c")]
    assert hidden_states[0].equal(hidden_states[1])
    assert hidden_states[0].equal(hidden_states[2])
    assert weights.stored_dtype(Path("half")) == torch.bfloat16
    model = laconic.load("b")
    assert model.generate(["It stands"], config=GenerationConfig(max_tokens=2))[0].token_ids
