"""R7, simulated: after a failed allocation the micro-batch is halved, at most three times; the update is equal."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import OutOfMemoryError
from laconic.interfaces import StepOutput
from laconic.training.loop import train
from laconic.training.optim import build_adamw
from laconic.training.run import TrainingSetup
from tests.tiny_recipes import TINY_RECIPE
from tests.tolerances import RECOMPUTE, error
from tests.training.toy import ToyBatch, ToyData, ToyMethod
from tests.training.toy_runs import flat_parameters, run_training, runs_equal, toy_config

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("could not create a primitive"),
    MemoryError(),
    RuntimeError("can't start new thread"),
]


class LimitedMemory(ToyMethod):
    """Raises an error for more than a number of rows at once."""

    def __init__(self, rows: int, error: BaseException) -> None:
        super().__init__(0.0)
        self.rows, self.error = rows, error

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        if self.rows < batch.B:
            raise self.error
        return super().forward(batch, state)


@pytest.mark.parametrize("error_", ERRORS, ids=lambda e: str(e)[:20])
def test_out_of_memory_halves_the_micro_batch(tmp_path: Path, error_: BaseException) -> None:
    limited, plain = LimitedMemory(3, error_), ToyMethod(0.0)
    run_training(tmp_path / "run", toy_config(steps=3, micro_batch_size=None), method=limited)
    train(TrainingSetup(plain, ToyData(), toy_config(steps=3, micro_batch_size=2), seed=5))
    assert torch.equal(flat_parameters(limited), flat_parameters(plain))
    whole = ToyMethod(0.0)
    train(TrainingSetup(whole, ToyData(), toy_config(steps=3, micro_batch_size=None), seed=5))
    assert error(flat_parameters(limited), flat_parameters(whole)) <= RECOMPUTE


def test_out_of_memory_resumes_with_the_smaller_micro_batch(tmp_path: Path) -> None:
    settings = toy_config(micro_batch_size=None, keep_every=4)
    for name in ("run", "never"):
        run_training(tmp_path / name, settings, method=LimitedMemory(3, ERRORS[0]))
    with pytest.warns(UserWarning, match="later steps"):
        run_training(tmp_path / "run", settings, method=ToyMethod(0.0), resume=4)
    assert runs_equal(tmp_path / "run", tmp_path / "never")


@pytest.mark.parametrize(("rows", "batch", "last"), [(1, 32, 4), (0, 2, 1)])
def test_out_of_memory_advice_after_three_halvings(rows: int, batch: int, last: int) -> None:
    with pytest.raises(OutOfMemoryError, match=f"micro-batch of {last} rows; set activation_checkpointing = 1"):
        train(
            TrainingSetup(
                LimitedMemory(rows, ERRORS[0]), ToyData(), toy_config(batch_size=batch, micro_batch_size=None)
            )
        )


def test_out_of_memory_in_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, closure: Any = None) -> None:
        raise ERRORS[0]

    toy = ToyMethod()
    monkeypatch.setattr(type(build_adamw(toy, toy_config())), "step", full)
    with pytest.raises(OutOfMemoryError, match="in the optimizer; set activation_checkpointing = 1"):
        train(TrainingSetup(toy, ToyData(), toy_config()))


def test_other_runtime_errors_are_not_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        train(TrainingSetup(LimitedMemory(0, RuntimeError("a bug")), ToyData(), toy_config()))


LIMITED = """
import resource, sys
from laconic.cli.main import main
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv.pop(1)),) * 2)
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [1600, 1400, 1200, 1000, 800])
def test_train_within_a_limit_of_memory(tmp_path: Path, megabytes: int) -> None:
    """A real limit: the run ends, with a smaller micro-batch if need be, or says in one line that memory is short."""
    recipe = TINY_RECIPE.replace("batch_size = 8", "batch_size = 512").replace("steps = 4", "steps = 1")
    recipe = recipe.replace("train_rows = 200", "train_rows = 600").replace("hidden_size = 16", "hidden_size = 256")
    (tmp_path / "big.toml").write_text(recipe.replace("num_hidden_layers = 1", "num_hidden_layers = 4"))
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(megabytes * 2**20), "train", "big.toml", "--out", "run"],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode in (0, 71), result.stderr
    assert "Traceback" not in result.stderr
