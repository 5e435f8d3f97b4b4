"""`torchrun --nproc-per-node 2 -m laconic train` as a user gives it: the same losses, a run that is opened single."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.experiment.load_run import load_run
from laconic.storage.run_dir import RunDirectory
from tests.cli.test_train import metrics
from tests.conftest import REPO, call_cli
from tests.tiny_recipes import TINY_RECIPE
from tests.tolerances import RECOMPUTE
from tests.training.multi_rank import run_ranks

pytestmark = pytest.mark.loopback
RECIPE = TINY_RECIPE + '[distillation]\nhidden_scale = "none"\n'  # the default scales by statistics of a micro-batch


@pytest.fixture(autouse=True)
def recipe_in_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)


def losses(folder: str) -> list[list[float]]:
    return [[line[name] for name in ("loss", "student", "teacher")] for line in metrics(folder) if "loss" in line]


@pytest.mark.medium
@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_train_on_two_ranks_as_on_one(tmp_path: Path, parallel: Any) -> None:
    assert call_cli("train", "tiny.toml", "--out", "one") == 0
    two = ("train", "tiny.toml", "--out", "two", f"train.parallel={parallel}")
    assert [end.result for end in run_ranks(tmp_path, lambda: call_cli(*two))] == [0, 0]
    results, expected = torch.tensor(losses("two")), torch.tensor(losses("one"))
    assert results.shape == expected.shape == (4, 3)
    assert ((results - expected).abs() <= RECOMPUTE * expected.abs().clamp(min=1)).all()
    assert [line for line in metrics("two") if "validation" in line] == [
        line for line in metrics("one") if "validation" in line
    ]
    run = load_run(tmp_path / "two", torch.device("cpu"))
    single = load_run(tmp_path / "one", torch.device("cpu"))
    for (name, p), q in zip(run.method.named_parameters(), single.method.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-4, name
    assert call_cli("train", "tiny.toml", "--out", "two", "train.steps=6") == 0
    assert RunDirectory("two").step_numbers()[-1] == 6


def test_train_invalid_recipe_ends_all_ranks(tmp_path: Path) -> None:
    args = ("train", "tiny.toml", "--out", "two", "train.batch_size=1")
    assert [end.result for end in run_ranks(tmp_path, lambda: call_cli(*args))] == [2, 2]


def run_torchrun(*args: str) -> None:
    """Run `laconic train tiny.toml` on two ranks, which must succeed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*launcher, "-m", "laconic", "train", "tiny.toml", *args],
        env=os.environ | {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_train_under_torchrun() -> None:
    run_torchrun("--out", "two", "--device", "cpu", "train.parallel=fsdp", "train.reshard=true")
    assert RunDirectory("two").get_step(4).manifest.files.keys() >= {
        "model/shard-00002-model-00001-of-00001.safetensors", "config.json", "tokenizer.json", "rng-00001.safetensors",
    }  # fmt: skip


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize(
    "keys", [("train.parallel=ddp",), ("train.parallel=fsdp",), ("train.parallel=fsdp", "train.reshard=true")]
)
def test_train_with_nccl(keys: tuple[str, ...]) -> None:
    assert call_cli("train", "tiny.toml", "--out", "one", "--device", "cpu") == 0
    run_torchrun("--out", "two", *keys)
    results, expected = torch.tensor(losses("two")), torch.tensor(losses("one"))
    assert results.shape == expected.shape == (4, 3)
    assert ((results - expected).abs() <= 1e-4 * expected.abs().clamp(min=1)).all()
