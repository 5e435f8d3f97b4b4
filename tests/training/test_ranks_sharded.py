"""FSDP2 with resharding, with whole-matrix optimizers and with nested models: the losses and weights of one process."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from laconic.config.load import load_recipe
from laconic.config.recipe import Recipe
from laconic.config.training import TrainingConfig
from laconic.experiment.from_recipe.build import build_experiment
from laconic.experiment.load_run import load_run
from laconic.experiment.run_init import init_run
from laconic.models.block import Block
from laconic.storage.run_dir import RunDirectory
from laconic.training.distributed import init_ranks
from laconic.training.loop import train
from tests.latent.batches import build_kava
from tests.tolerances import FLOAT32, RECOMPUTE, error
from tests.training.multi_rank import run_ranks_ok
from tests.training.test_distributed import ReasoningData, train_on_ranks
from tests.training.toy_runs import read_metrics, run_training, toy_config

pytestmark = [pytest.mark.loopback, pytest.mark.usefixtures("unchecked")]
CPU = torch.device("cpu")
LANGUAGE_MODEL = """method = "lm"
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
"""
HOPE = """method = "hope"
[model]
family = "llama"
tokenizer = "bytes"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[mixer]
num_heads = 2
[cms]
chunk_sizes = [8]
inner_objective = "associative"
"""
SHARED = """[data]
source = "text"
path = "BOOKS"
text = { row_tokens = 16, segment_tokens = 8, segment_lengths = "fixed" }
[train]
steps = 4
batch_size = 4
micro_batch_size = 1
learning_rate = 1e-2
lr_schedule = "constant"
save_every = 2
keep_every = 2
"""
# DGD counts the positions whose gradient is not 0, and the first query's is 0 up to rounding
WEIGHT_TOLERANCE = {"dgd": 1e-3}
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "adamw": (LANGUAGE_MODEL, ("train.reshard=true",)),
    "m3": (LANGUAGE_MODEL, ("train.optimizer=m3", "train.reshard=true")),
    "dgd": (LANGUAGE_MODEL, ("train.optimizer=dgd", "train.reshard=true")),
    "hope": (HOPE, ("mixer.self_modifying.memory_chunk_size=8", "mixer.self_modifying.projection_chunk_size=8")),
    "hope-m3": (HOPE, ("mixer.kind=attention", "train.optimizer=m3")),
    "titans": (HOPE, ("mixer.kind=titans",)),
    "hope-attention": (HOPE, ("mixer.kind=attention",)),
}


def write_recipe(folder: Path, case: str) -> Callable[..., Recipe]:
    """Write books and the recipe of a case; return a function that loads the recipe with more keys."""
    rows = [{"book": f"b{i}", "text": f"{i} " + chr(97 + i % 26) * 90} for i in range(12)]
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables, keys = CASES[case]
    (folder / "small.toml").write_text(tables + SHARED.replace("BOOKS", str(folder / "books.jsonl")))

    def load(*more: str) -> Recipe:
        usable = [key for key in keys if key != "train.reshard=true" or "train.parallel=fsdp" in more]
        return load_recipe(folder / "small.toml", [*usable, *more])[0]

    return load


def train_recipe(path: Path, recipe: Recipe) -> None:
    """Run or resume training on this rank, or in this process."""
    run = RunDirectory(path)
    with init_ranks(recipe.train, CPU) as ranks, ranks.lock_run(run):
        ranks.run_on_rank_zero(lambda: init_run(run, recipe, "auto", {}))
        experiment = build_experiment(recipe, CPU)
        if recipe.train.optimizer != "adamw":  # M3's Newton-Schulz rounds float32 to bfloat16, DGD solves a system
            experiment.method.double()
        train(experiment.build_training_setup(CPU, ranks), run=run)


def compare_losses(one: Path, other: Path) -> float:
    """Return the largest difference of the loss of an update of two runs, relative to 1 or its size."""
    losses = [[line["loss"] for line in read_metrics(path) if "loss" in line] for path in (one, other)]
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(*losses, strict=True))


def compare_weights(one: Path, other: Path) -> float:
    """Return the largest relative difference of a trained tensor between two runs."""
    methods = [load_run(path, CPU).method for path in (one, other)]
    pairs = zip(methods[0].named_parameters(), methods[1].parameters(), strict=True)
    return max(error(p, q) for (_, p), q in pairs)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("world", "more"),
    [(2, {}), pytest.param(4, {"activation_checkpointing": 1}, marks=pytest.mark.slow)],
)
def test_fsdp_reshard_gathers_one_block_at_a_time(tmp_path: Path, world: int, more: dict[str, Any]) -> None:
    """With validations that call the method more often on one rank than on another."""

    def settings(**keys: Any) -> TrainingConfig:
        return toy_config(
            steps=2, micro_batch_size=2, learning_rate=1e-3, warmup_ratio=0.0, validate_every=1, best_metric=None,
            keep_best=0, **more, **keys,
        )  # fmt: skip

    def method() -> nn.Module:
        return build_kava("llama", distillation={"hidden_scale": "none"}).float()  # a scale is a micro-batch's own

    def work() -> int:
        student, most = method(), 0
        blocks = [module for module in student.modules() if isinstance(module, Block)]

        def count_gathered(*_: Any) -> None:
            nonlocal most
            gathered = [block for block in blocks if not isinstance(next(block.parameters()), DTensor)]
            most = max(most, len(gathered)) if student.training else most

        def validate(epoch: int) -> Mapping[str, float]:
            with torch.no_grad():
                for _ in range(int(os.environ["RANK"]) + 1):
                    student(ReasoningData().batch([0], epoch, 0))
            return {"accuracy": 1.0}

        for block in blocks:
            block.submodule("norm1").register_forward_hook(count_gathered)
        keys = settings(parallel="fsdp", reshard=True)
        train_on_ranks(tmp_path / "ranks", keys, student, data=ReasoningData(), validate=validate)
        return most

    run_training(tmp_path / "one", settings(), method=method(), data=ReasoningData())
    gathered = run_ranks_ok(tmp_path, work, world)
    assert compare_losses(tmp_path / "ranks", tmp_path / "one") <= RECOMPUTE
    assert gathered == [1] * world  # of two blocks


@pytest.mark.medium
@pytest.mark.parametrize(
    "case", ["m3", "dgd", "hope", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw", "titans"))]
)
def test_fsdp_trains_as_one_process_and_resumes_in_one(tmp_path: Path, case: str) -> None:
    recipe = write_recipe(tmp_path, case)
    train_recipe(tmp_path / "one", recipe())
    half = recipe("train.parallel=fsdp", "train.steps=2")
    run_ranks_ok(tmp_path, lambda: train_recipe(tmp_path / "two", half))
    train_recipe(tmp_path / "two", recipe())
    assert compare_losses(tmp_path / "two", tmp_path / "one") <= RECOMPUTE
    assert compare_weights(tmp_path / "two", tmp_path / "one") <= WEIGHT_TOLERANCE.get(case, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fsdp_resumes_on_four_ranks(tmp_path: Path, case: str) -> None:
    recipe = write_recipe(tmp_path, case)
    train_recipe(tmp_path / "one", recipe())
    train_recipe(tmp_path / "four", recipe("train.steps=2"))
    run_ranks_ok(tmp_path, lambda: train_recipe(tmp_path / "four", recipe("train.parallel=fsdp")), 4)
    assert compare_losses(tmp_path / "four", tmp_path / "one") <= RECOMPUTE
    assert compare_weights(tmp_path / "four", tmp_path / "one") <= WEIGHT_TOLERANCE.get(case, FLOAT32)
