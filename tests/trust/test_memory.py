"""R7, simulated: an allocation fails; the micro-batch is halved, three times at most, and the update is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import OutOfMemoryError
from laconic.interfaces import StepOutput
from laconic.training.loop import train
from laconic.training.optim import build_adamw
from tests.tolerances import RECOMPUTE, error
from tests.training.toy import ToyBatch, ToyData, ToyMethod
from tests.training.toy_runs import flat_parameters, run_training, runs_equal, toy_config

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


class Tight(ToyMethod):
    """Holds no more than so many rows at once, and says so amid a backward pass of others."""

    def __init__(self, rows: int, error: BaseException) -> None:
        super().__init__(0.0)
        self.rows, self.error = rows, error

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        if self.rows < batch.B:
            raise self.error
        return super().forward(batch, state)


@pytest.mark.parametrize("error_", ERRORS, ids=lambda e: type(e).__name__)
def test_the_micro_batch_is_halved(tmp_path: Path, error_: BaseException) -> None:
    tight, plain = Tight(3, error_), ToyMethod(0.0)
    run_training(tmp_path / "run", toy_config(micro_batch_size=None), method=tight)
    train(plain, ToyData(), toy_config(micro_batch_size=2), seed=5)
    assert torch.equal(flat_parameters(tight), flat_parameters(plain))
    whole = ToyMethod(0.0)
    train(whole, ToyData(), toy_config(micro_batch_size=None), seed=5)
    assert error(flat_parameters(tight), flat_parameters(whole)) <= RECOMPUTE


def test_a_resumed_run_keeps_the_smaller_one(tmp_path: Path) -> None:
    settings = toy_config(micro_batch_size=None, keep_every=4)
    for name in ("run", "never"):
        run_training(tmp_path / name, settings, method=Tight(3, ERRORS[0]))
    with pytest.warns(UserWarning, match="put aside"):
        run_training(tmp_path / "run", settings, method=ToyMethod(0.0), resume=4)
    assert runs_equal(tmp_path / "run", tmp_path / "never")


@pytest.mark.parametrize(("rows", "batch", "last"), [(1, 32, 4), (0, 2, 1)])
def test_after_three_times_the_run_ends_with_a_plan(rows: int, batch: int, last: int) -> None:
    told = (
        rf"^no memory for a micro-batch of {last} rows; set recompute = 1, precision = \"bfloat16\", what = \"lora\", "
    )
    with pytest.raises(OutOfMemoryError, match=told):
        train(Tight(rows, ERRORS[0]), ToyData(), toy_config(batch_size=batch, micro_batch_size=None))


def test_no_memory_for_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, closure: Any = None) -> None:
        raise ERRORS[0]

    toy = ToyMethod()
    monkeypatch.setattr(type(build_adamw(toy, toy_config())), "step", full)
    with pytest.raises(OutOfMemoryError, match=r"^no memory for the optimizer; set recompute = 1"):
        train(toy, ToyData(), toy_config())


def test_other_errors_are_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        train(Tight(0, RuntimeError("a bug")), ToyData(), toy_config())
