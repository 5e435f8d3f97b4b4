"""Optimizers M3 and DGD: parameter groups, refusals, and resumed runs equal bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.errors import UsageError
from laconic.experiment.from_recipe.build import build_experiment, build_optimizer
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


def train_run(path: Path, config: Recipe, **more: Any) -> None:
    experiment, run = build_experiment(config, CPU), RunDirectory(path)
    with run.lock():
        train(experiment.build_training_setup(CPU), run=run, **more)


@pytest.mark.medium
@pytest.mark.parametrize("name", ["m3", "dgd"])
def test_resumed_run_equals_uninterrupted_run(tmp_path: Path, name: str) -> None:
    config = recipe(tmp_path, f"train.optimizer={name}")
    train_run(tmp_path / "whole", config)
    train_run(tmp_path / "run", config)
    with pytest.warns(UserWarning, match="renamed the checkpoints of later steps"):
        train_run(tmp_path / "run", config, resume=2)
    assert runs_equal(tmp_path / "run", tmp_path / "whole", 4)
    train_run(tmp_path / "adamw", recipe(tmp_path))
    assert read_metrics(tmp_path / "adamw")[0]["loss"] == read_metrics(tmp_path / "whole")[0]["loss"]
    assert read_metrics(tmp_path / "adamw")[-1]["loss"] != read_metrics(tmp_path / "whole")[-1]["loss"]


def test_m3_parameter_groups(tmp_path: Path) -> None:
    experiment = build_experiment(recipe(tmp_path, "train.optimizer=m3", "train.weight_decay=0.1"), CPU)
    optimizer = build_optimizer(experiment.method, experiment.recipe.train)
    rules = {group["rule"]: [p.ndim for p in group["params"]] for group in optimizer.param_groups}
    assert set(rules["m3"]) == {2}
    assert len(rules["m3"]) == 7, "projections of the only block"
    assert rules["adamw"].count(2) == 2, "embedding and head"
    assert {group["rule"]: group["weight_decay"] for group in optimizer.param_groups} == {"m3": 0.1, "adamw": 0.0}


def test_early_stop_by_a_loss_is_refused() -> None:
    settings = ["train.early_stop.metric=nats", "train.early_stop.at_least=1.0"]
    with pytest.raises(UsageError, match=r"train\.early_stop.*a loss falls"):
        build_experiment(load_recipe("read-books", settings)[0], CPU)


def test_optimizer_refusals(tmp_path: Path) -> None:
    config = recipe(tmp_path, "train.optimizer=dgd", "train.weight_decay=0.1")
    with pytest.raises(UsageError, match=r"train\.weight_decay"):
        build_optimizer(build_experiment(config, CPU).method, config.train)
    config = recipe(tmp_path, "train.optimizer=m3", "train.eps=1e-6")
    with pytest.raises(UsageError, match=r"train\.eps 1e-06: m3"):
        build_optimizer(build_experiment(config, CPU).method, config.train)
    with pytest.raises(UsageError, match=r"train\.optimizer"):
        recipe(tmp_path, "train.optimizer=dgd", "method=hope")
