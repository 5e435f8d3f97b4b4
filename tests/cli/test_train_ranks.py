"""`torchrun --nproc-per-node 2 -m laconic train` as a user gives it: the same losses, a run that is opened alone."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.cli import main as cli
from laconic.experiment.load_run import load_run
from laconic.storage.run_dir import RunDirectory
from tests.cli.test_train import metrics
from tests.conftest import REPO, TINY_RECIPE
from tests.tolerances import RECOMPUTE
from tests.training.multi_rank import run_ranks

pytestmark = pytest.mark.loopback
NORMLESS = TINY_RECIPE + '[distilling]\ncodi_norm = "none"\n'  # else a deviation is of the rows of a micro-batch


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.toml").write_text(NORMLESS)
    monkeypatch.chdir(tmp_path)


def command(*args: str) -> int:
    """The exit code of a command line, in this process."""
    sys.argv = ["laconic", *args]
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def losses(folder: str) -> list[list[float]]:
    return [[line[name] for name in ("loss", "student", "teacher")] for line in metrics(folder) if "loss" in line]


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_ranks_train_as_one(tmp_path: Path, parallel: Any) -> None:
    assert command("train", "tiny.toml", "--out", "one") == 0
    two = ("train", "tiny.toml", "--out", "two", f"train.parallel={parallel}")
    assert [end.said for end in run_ranks(tmp_path, lambda: command(*two))] == [0, 0]
    found, asked = torch.tensor(losses("two")), torch.tensor(losses("one"))
    assert found.shape == asked.shape == (4, 3)
    assert ((found - asked).abs() <= RECOMPUTE * asked.abs().clamp(min=1)).all()
    assert [line for line in metrics("two") if "validation" in line] == [
        line for line in metrics("one") if "validation" in line
    ]
    run = load_run(tmp_path / "two", torch.device("cpu"))
    alone = load_run(tmp_path / "one", torch.device("cpu"))
    for (name, p), q in zip(run.method.named_parameters(), alone.method.parameters(), strict=True):
        assert (p - q).abs().max() <= 1e-4, name
    assert command("train", "tiny.toml", "--out", "two", "train.steps=6") == 0
    assert RunDirectory("two").step_numbers()[-1] == 6


def test_a_bad_recipe_ends_all_ranks_alike(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, lambda: command("train", "tiny.toml", "--out", "two", "train.batch_size=1"))
    assert [end.said for end in found] == [2, 2]


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = subprocess.run(
        [*launcher, "-m", "laconic", "train", "tiny.toml", "--out", "two", "train.parallel=fsdp"],
        env=os.environ | {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert RunDirectory("two").get_step(4).manifest.files.keys() >= {
        "model/shard-00002-model-00001-of-00001.safetensors", "config.json", "tokenizer.json", "rng-00001.safetensors",
    }  # fmt: skip
