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
from tests.training.ground import how, parameters, same, trained
from tests.training.toy import Points, Rows, Toy

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


class Tight(Toy):
    """Holds no more than so many rows at once, and says so amid a backward pass of others."""

    def __init__(self, rows: int, error: BaseException) -> None:
        super().__init__(0.0)
        self.rows, self.error = rows, error

    def forward(self, batch: Rows, state: Any = None) -> StepOutput:
        if self.rows < batch.B:
            raise self.error
        return super().forward(batch, state)


@pytest.mark.parametrize("error_", ERRORS, ids=lambda e: type(e).__name__)
def test_the_micro_batch_is_halved(tmp_path: Path, error_: BaseException) -> None:
    tight, plain = Tight(3, error_), Toy(0.0)
    trained(tmp_path / "run", how(micro=None), method=tight)
    train(plain, Points(), how(micro=2), seed=5)
    assert torch.equal(parameters(tight), parameters(plain))
    whole = Toy(0.0)
    train(whole, Points(), how(micro=None), seed=5)
    assert error(parameters(tight), parameters(whole)) <= RECOMPUTE


def test_a_resumed_run_keeps_the_smaller_one(tmp_path: Path) -> None:
    settings = how(micro=None, keep_every=4)
    for name in ("run", "never"):
        trained(tmp_path / name, settings, method=Tight(3, ERRORS[0]))
    with pytest.warns(UserWarning, match="put aside"):
        trained(tmp_path / "run", settings, method=Toy(0.0), resume=4)
    assert same(tmp_path / "run", tmp_path / "never")


@pytest.mark.parametrize(("rows", "batch", "last"), [(1, 32, 4), (0, 2, 1)])
def test_after_three_times_the_run_ends_with_a_plan(rows: int, batch: int, last: int) -> None:
    told = (
        rf"^no memory for a micro-batch of {last} rows; set recompute = 1, precision = \"bfloat16\", what = \"lora\", "
    )
    with pytest.raises(OutOfMemoryError, match=told):
        train(Tight(rows, ERRORS[0]), Points(), how(batch=batch, micro=None))


def test_no_memory_for_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, closure: Any = None) -> None:
        raise ERRORS[0]

    toy = Toy()
    monkeypatch.setattr(type(build_adamw(toy, how())), "step", full)
    with pytest.raises(OutOfMemoryError, match=r"^no memory for the optimizer; set recompute = 1"):
        train(toy, Points(), how())


def test_other_errors_are_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        train(Tight(0, RuntimeError("a bug")), Points(), how())
