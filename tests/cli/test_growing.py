"""Levels added to a run's model, and a model that learns while it reads written as a checkpoint, by commands."""

import json
from pathlib import Path

import pytest
import torch

import laconic
from laconic.models import weights
from laconic.nested.hope.model import Hope
from tests.conftest import RunCli
from tests.recipe.books import RECIPE

pytestmark = pytest.mark.usefixtures("unchecked")
GROWN = RECIPE.replace(
    'family = "llama"\ntokenizer = "bytes"\nhidden_size = 8\nnum_hidden_layers = 1\n',
    'name = "small/steps/step-000001"\n',
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_cli: RunCli, tmp_path: Path) -> RunCli:
    """Run a command in a directory with a small run and recipes."""
    rows = [{"book": f"b{b}", "text": f"Book {b}. " + "It stands here. " * 6} for b in range(4)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for name, content in (("books.jsonl", text), ("books.toml", RECIPE), ("grown.toml", GROWN)):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert run_cli("train", "books.toml", "--out", "small", "cms.chunk_sizes=[4]").code == 0
    return run_cli


def test_levels_grow_from_run_to_run_and_not_inside_one(run: RunCli) -> None:
    code, said = run("train", "books.toml", "--out", "small", "cms.chunk_sizes=[4, 8]")
    assert code == 2
    assert said.endswith("was begun by another recipe; choose another --out, or change back\n"
                         "cms.chunk_sizes: [4] there, [4, 8] asked")  # fmt: skip
    code, said = run("train", "grown.toml", "--out", "grown")
    assert code == 0, said
    small, grown = (Hope.from_pretrained(f"{name}/steps/step-000001") for name in ("small", "grown"))
    assert (small.hope_config.chunk_sizes, grown.hope_config.chunk_sizes) == (((4,),), ((4, 8),))
    added = grown.get_parameter("model.layers.0.mlp.levels.1.down_proj.weight")
    assert 0 < added.abs().max() < 2e-3, "it began at zero, and was trained one step"
    assert run("train", "grown.toml", "--out", "bad", "cms.chunk_sizes=[8, 16]")[0] == 2


def test_a_folder_is_exported_as_a_run_is(run: RunCli) -> None:
    assert run("export", "small", "--out", "a")[0] == 0
    assert run("export", "a", "--out", "b")[0] == 0
    assert run("export", "small/steps/step-000001", "--out", "c")[0] == 0
    assert run("export", "a", "--out", "half", "--dtype", "bfloat16")[0] == 0
    ids = torch.arange(40)[None]
    said = [Hope.from_pretrained(name).read_tokens(ids).hidden_states for name in ("a", "b", "c")]
    assert said[0].equal(said[1])
    assert said[0].equal(said[2])
    assert weights.stored_dtype(Path("half")) == torch.bfloat16
    model = laconic.load_text_model("b")
    assert model.generate(["It stands"], max_tokens=2)[0].token_ids
