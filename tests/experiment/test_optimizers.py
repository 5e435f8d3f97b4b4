"""Optimizers by name: what moves what, and runs that are resumed bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.errors import UsageError
from laconic.experiment.build import build_experiment
from laconic.experiment.optimizers import build_optimizer
from laconic.storage.run_dir import RunDirectory
from laconic.training.loop import train
from tests.training.toy_runs import read_metrics, runs_equal

pytestmark = pytest.mark.usefixtures("unchecked")
CPU = torch.device("cpu")
SMALL = """method = "lm"
seed = 5
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
[data]
source = "text"
path = "books.jsonl"
text = { row_tokens = 48, segment_tokens = 16 }
[train]
steps = 4
batch_size = 4
micro_batch_size = 2
learning_rate = 1e-2
warmup_ratio = 0.5
save_every = 2
keep_every = 2
"""


def recipe(folder: Path, *more: str) -> Recipe:
    rows = [{"book": f"b{i % 6}", "text": f"{i} " + chr(97 + i % 26) * 90} for i in range(12)]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "small.toml").write_text(SMALL)
    return load_recipe(folder / "small.toml", more)[0]


def trained(path: Path, asked: Recipe, **more: Any) -> None:
    built, run = build_experiment(asked, CPU), RunDirectory(path)
    with run.lock():
        train(
            built.method,
            built.training_data,
            asked.train,
            run=run,
            seed=5,
            model_io=built.checkpoint,
            fingerprints=built.fingerprints,
            build_optimizer=optimizer,
            **more,
        )


@pytest.mark.parametrize("name", ["m3", "dgd"])
def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path: Path, name: str) -> None:
    asked = recipe(tmp_path, f"train.optimizer={name}")
    trained(tmp_path / "never", asked)
    trained(tmp_path / "run", asked)
    with pytest.warns(UserWarning, match="are put aside"):
        trained(tmp_path / "run", asked, resume=2)
    assert runs_equal(tmp_path / "run", tmp_path / "never", 4)
    trained(tmp_path / "usual", recipe(tmp_path))
    assert read_metrics(tmp_path / "usual")[0]["loss"] == read_metrics(tmp_path / "never")[0]["loss"]
    assert read_metrics(tmp_path / "usual")[-1]["loss"] != read_metrics(tmp_path / "never")[-1]["loss"]


def test_matrices_are_moved_by_what_is_named(tmp_path: Path) -> None:
    built = build_experiment(recipe(tmp_path, "train.optimizer=m3", "train.weight_decay=0.1"), CPU)
    made = build_optimizer(built.method, built.recipe.train)
    rules = {group["rule"]: [p.ndim for p in group["params"]] for group in made.param_groups}
    assert set(rules["m3"]) == {2}
    assert len(rules["m3"]) == 7, "maps of the one block"
    assert rules["adamw"].count(2) == 2, "the table and the head"
    assert {group["decay"] for group in made.param_groups} == {0.1}


def test_what_an_optimizer_does_not_do_is_said(tmp_path: Path) -> None:
    asked = recipe(tmp_path, "train.optimizer=dgd", "train.weight_decay=0.1")
    with pytest.raises(
        UsageError, match=r"train\.weight_decay 0\.1 with dgd: its erasing is its decay; leave the key out"
    ):
        build_optimizer(build_experiment(asked, CPU).method, asked.train)
    with pytest.raises(
        UsageError, match=r'parallel=fsdp: "fsdp" with optimizer m3: it moves whole matrices; take "ddp"'
    ):
        recipe(tmp_path, "train.optimizer=m3", "train.parallel=fsdp")
    with pytest.raises(
        UsageError, match=r'"dgd" with method hope: its maps read starts and changes together, which no map'
    ):
        recipe(tmp_path, "train.optimizer=dgd", "method=hope")
