"""R3: a signal ends a run after the current step with exit code 75; a second one ends it at once."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.training import TrainingConfig
from laconic.errors import PreemptedError
from laconic.interfaces import StepOutput
from laconic.storage.run_dir import RunDirectory
from laconic.training.loop import train
from laconic.training.run import TrainingSetup
from tests.training.toy import ToyBatch, ToyData, ToyMethod
from tests.training.toy_runs import run_training, runs_equal, toy_config
from tests.trust.children import Child


class SlowMethod(ToyMethod):
    """Reports every update before it runs, and sleeps in it."""

    def __init__(self, tell: Callable[[int], None], seconds: float) -> None:
        super().__init__()
        self.tell, self.seconds = tell, seconds

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        self.tell(batch.step)
        time.sleep(self.seconds)
        return super().forward(batch, state)


def start_slow_run(path: Path, settings: TrainingConfig, seconds: float = 0.05, **named: Any) -> Child:
    return Child(lambda tell: run_training(path, settings, method=SlowMethod(tell, seconds), **named) and None)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("number", "at"),
    [(signal.SIGTERM, 3), (signal.SIGINT, 0), (signal.SIGUSR1, 7), (signal.SIGHUP, 2)],
    ids=lambda x: str(x),
)
def test_signal_commits_the_current_step(tmp_path: Path, number: int, at: int) -> None:
    settings = toy_config(micro_batch_size=8, save_every=100)
    child = start_slow_run(tmp_path / "run", settings)
    child.wait_for(at)
    child.signal(number)
    assert child.end() == PreemptedError.exit_code
    assert RunDirectory(tmp_path / "run").step_numbers() == [at + 1]
    run_training(tmp_path / "run", settings)
    run_training(tmp_path / "never", settings)
    assert runs_equal(tmp_path / "run", tmp_path / "never")


def test_signal_in_validation(tmp_path: Path) -> None:
    """The validation is interrupted, and repeated by the resumed run."""
    settings = toy_config(micro_batch_size=8, save_every=100, validate_every=5, best_metric="accuracy")

    def slow_validation(tell: Callable[[int], None]) -> None:
        def validate(epoch: int) -> dict[str, float]:
            torch.rand(3)
            tell(1)
            with contextlib.suppress(Exception):
                time.sleep(30)
            return {"accuracy": 1.0}

        run_training(tmp_path / "run", settings, validate=validate)

    child = Child(slow_validation)
    child.wait_for(1)
    child.signal(signal.SIGTERM)
    assert child.end() == PreemptedError.exit_code
    assert RunDirectory(tmp_path / "run").step_numbers() == [5]
    for name in ("run", "never"):
        run_training(tmp_path / name, settings, validate=lambda epoch: {"accuracy": 0.5})
    assert runs_equal(tmp_path / "run", tmp_path / "never")


def test_signal_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = RunDirectory.commit_step

    def signalled(self: RunDirectory, *args: Any, **named: Any) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return commit(self, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "commit_step", signalled)
        with pytest.raises(PreemptedError, match="SIGTERM: stopped after step 4 of 12"):
            run_training(tmp_path / "run")
    run_training(tmp_path / "run")
    run_training(tmp_path / "never")
    assert runs_equal(tmp_path / "run", tmp_path / "never")


@pytest.mark.medium
def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Even during an operation that does not return to Python."""
    child = start_slow_run(tmp_path / "run", toy_config(micro_batch_size=8, save_every=2), 0.05)
    child.wait_for(3)
    child.signal(signal.SIGTERM)
    child.signal(signal.SIGSTOP)
    child.signal(signal.SIGTERM)
    child.signal(signal.SIGCONT)
    assert child.end() in (128 + signal.SIGTERM, PreemptedError.exit_code)
    stuck = start_slow_run(tmp_path / "stuck", toy_config(micro_batch_size=8, save_every=2), 30)
    stuck.wait_for(0)
    stuck.signal(signal.SIGINT)
    time.sleep(0.1)
    stuck.signal(signal.SIGTERM)
    assert stuck.end() == 128 + signal.SIGTERM
    for name in ("run", "stuck", "never"):
        run_training(tmp_path / name, toy_config(micro_batch_size=8, save_every=2))
    assert runs_equal(tmp_path / "run", tmp_path / "never")
    assert runs_equal(tmp_path / "stuck", tmp_path / "never")


def test_signal_without_a_folder_restores_handlers() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]

    class Signalled(ToyMethod):
        def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
            os.kill(os.getpid(), signal.SIGUSR1)
            return super().forward(batch, state)

    with pytest.raises(PreemptedError, match="SIGUSR1: stopped after step 1 of 12"):
        train(TrainingSetup(Signalled(), ToyData(), toy_config(micro_batch_size=None)))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_signals_outside_the_main_thread_are_ignored() -> None:
    import threading

    done: list[int] = []
    thread = threading.Thread(
        target=lambda: done.append(train(TrainingSetup(ToyMethod(), ToyData(), toy_config(steps=2))).steps)
    )
    thread.start()
    thread.join()
    assert done == [2]


@pytest.mark.medium
def test_signal_sighup_does_not_abort_and_is_ignored_under_nohup(tmp_path: Path) -> None:
    """A terminal that is closed sends it, and so does its shell."""
    settings = toy_config(micro_batch_size=8, save_every=100)
    child = start_slow_run(tmp_path / "run", settings, 0.2)
    child.wait_for(1)
    for _ in range(2):
        child.signal(signal.SIGHUP)
        time.sleep(0.02)
    assert child.end() == PreemptedError.exit_code
    assert RunDirectory(tmp_path / "run").step_numbers() == [2]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child = start_slow_run(tmp_path / "run", settings)
        child.wait_for(4)
        child.signal(signal.SIGHUP)
        assert child.end() == 0
    finally:
        signal.signal(signal.SIGHUP, before)
