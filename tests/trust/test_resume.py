"""R4: a run that is stopped and resumed equals the uninterrupted run bit for bit."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn

from laconic.batches import ReasoningBatch
from laconic.config.methods import CoconutConfig, DistillationConfig, IcotConfig
from laconic.config.training import TrainingConfig
from laconic.errors import PreemptedError
from laconic.interfaces import StepOutput
from laconic.latent.coconut import Coconut
from laconic.latent.codi import Codi
from laconic.latent.cot import Cot, NoCot
from laconic.latent.icot import Icot
from laconic.latent.pccot import Pccot
from laconic.models.cache import KVCache
from laconic.nested.state import FastWeightState, LayerState, LinearMemoryState, OpenChunk
from laconic.nested.state_file import NODE_TYPES
from laconic.storage.run_dir import RunDirectory
from laconic.training import checkpoint
from laconic.training.ranks import Ranks
from tests.latent import batches
from tests.models.fixtures import fresh
from tests.training.toy import ToyBatch, ToyMethod
from tests.training.toy_runs import STEPS, read_metrics, run_training, runs_equal, toy_config
from tests.trust.children import Child


class SignalsItself(ToyMethod):
    """Sends a signal to its own process in one update."""

    def __init__(self, at: int, number: int) -> None:
        super().__init__()
        self.at, self.number = at, number

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        if batch.step == self.at:
            os.kill(os.getpid(), self.number)
            self.at = -1
        return super().forward(batch, state)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_resume_after_a_signal(tmp_path: Path, precision: str) -> None:
    settings = toy_config(precision=precision)
    run_training(tmp_path / "never", settings)
    for at in (1, 6):
        with pytest.raises(PreemptedError):
            run_training(tmp_path / "run", settings, method=SignalsItself(at, signal.SIGTERM))
    run_training(tmp_path / "run", settings)
    assert runs_equal(tmp_path / "run", tmp_path / "never")


def kill_and_resume(path: Path, never: Path, draw: int, settings: TrainingConfig) -> None:
    """Kill a run that saves every step at a random time, twice, then run it to the end."""
    chance = random.Random(draw)

    def work(tell: Callable[[int], None]) -> None:
        toy = ToyMethod()
        toy.register_forward_pre_hook(lambda module, args: tell(args[0].step))
        run_training(path, settings, method=toy)

    for _ in range(2):
        child = Child(work)
        child.wait_for(chance.randrange(STEPS // 2) + max(0, *RunDirectory(path).step_numbers(), 0) // 2)
        time.sleep(chance.uniform(0, 0.03))
        child.signal(signal.SIGKILL)
        assert child.end() in (0, 128 + signal.SIGKILL)
        steps = RunDirectory(path).step_numbers()
        assert max(steps, default=0) >= child.last - 1, "more than the current step was lost"
    run_training(path, settings)
    assert runs_equal(path, never)


@pytest.mark.medium
@pytest.mark.parametrize("draw", range(2))
def test_resume_after_kill_9(tmp_path: Path, draw: int) -> None:
    settings = toy_config(save_every=1)
    run_training(tmp_path / "never", settings)
    kill_and_resume(tmp_path / "run", tmp_path / "never", draw, settings)


@pytest.mark.slow
def test_resume_after_kill_9_often(tmp_path: Path) -> None:
    settings = toy_config(save_every=1)
    run_training(tmp_path / "never", settings)
    for draw in range(2, 60):
        kill_and_resume(tmp_path / f"run-{draw}", tmp_path / "never", draw, settings)


def resume_from_an_older_step(
    path: Path, step: int, settings: TrainingConfig, make: Callable[[], nn.Module], **named: Any
) -> None:
    """Resume a copy of a complete run from `step` and compare the results."""
    run_training(path / "never", settings, method=make(), **named)
    shutil.copytree(path / "never", path / "run")
    last = RunDirectory(path / "run").step_numbers()[-1]
    with pytest.warns(UserWarning, match=rf"later steps .*{last}"):
        run_training(path / "run", settings, method=make(), resume=step, **named)
    assert runs_equal(path / "run", path / "never", last)


def test_resume_after_the_end_and_from_an_older_step(tmp_path: Path) -> None:
    settings = toy_config(keep_every=4)
    resume_from_an_older_step(tmp_path, 4, settings, ToyMethod)
    assert len(read_metrics(tmp_path / "run")) == STEPS
    assert sorted(p.name for p in RunDirectory(tmp_path / "run").steps_folder.glob(".*")) == [
        ".bad-step-000008",
        ".bad-step-000012",
    ]
    run_training(tmp_path / "run", settings)
    assert runs_equal(tmp_path / "run", tmp_path / "never")


def check_random_state_is_restored(path: Path) -> None:
    """Dropout after a resume is that of the uninterrupted run."""
    stop_and_resume(path, toy_config())


def check_metrics_are_truncated(path: Path) -> None:
    """Metrics written after the last commit are removed on resume."""
    stop_and_resume(path, toy_config(save_every=4), killed=True)


def stop_and_resume(path: Path, settings: TrainingConfig, killed: bool = False) -> None:
    """Stop in the seventh update by a signal or kill -9, resume, and compare with an uninterrupted run."""
    run_training(path / "never", settings)
    if killed:
        child = Child(
            lambda tell: run_training(path / "run", settings, method=SignalsItself(6, signal.SIGKILL)) and None
        )
        assert child.end() == 128 + signal.SIGKILL
    else:
        with pytest.raises(PreemptedError):
            run_training(path / "run", settings, method=SignalsItself(6, signal.SIGTERM))
    torch.manual_seed(99)
    run_training(path / "run", settings)
    assert runs_equal(path / "run", path / "never")


@pytest.mark.filterwarnings("error")
def test_new_run_and_its_resumption_warn_of_nothing(tmp_path: Path) -> None:
    settings = toy_config(save_every=4)
    with pytest.raises(PreemptedError):
        run_training(tmp_path, settings, method=SignalsItself(6, signal.SIGTERM))
    run_training(tmp_path, settings)


def test_resume_warns_about_changed_metrics(tmp_path: Path) -> None:
    settings = toy_config(save_every=4)
    with pytest.raises(PreemptedError):
        run_training(tmp_path, settings, method=SignalsItself(6, signal.SIGTERM))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step":3', '"step":9', 1))
    with pytest.warns(UserWarning, match="was changed after it was written"):
        run_training(tmp_path, settings)


def test_resume_restores_random_state(tmp_path: Path) -> None:
    check_random_state_is_restored(tmp_path)


def test_resume_truncates_metrics(tmp_path: Path) -> None:
    check_metrics_are_truncated(tmp_path)


class CarriesCache(ToyMethod):
    """A cache that grows from step to step and shifts the next inputs."""

    state_types: ClassVar = {"KVCache": KVCache}

    def forward(self, batch: ToyBatch, state: KVCache | None = None) -> StepOutput:
        if state is not None:
            batch = replace(batch, x=batch.x + state.keys[0].mean())
        step = super().forward(batch)
        x = step.loss.detach().reshape(1, 1, 1, 1)
        new = KVCache((x,), (x,), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1).bool())
        return step._replace(state=new if state is None else state.append(new))


def test_resume_with_a_carried_cache(tmp_path: Path) -> None:
    resume_from_an_older_step(tmp_path, 5, toy_config(stateful=True, save_every=5, keep_every=5), CarriesCache)
    run_training(tmp_path / "without", toy_config(stateful=True), method=ToyMethod())
    assert read_metrics(tmp_path / "without")[0] == read_metrics(tmp_path / "never")[0]
    assert read_metrics(tmp_path / "without")[1] != read_metrics(tmp_path / "never")[1]


class CarriesFastWeights(ToyMethod):
    """Fast weights, one of them transposed in memory and used twice, shift the next inputs."""

    state_types: ClassVar = NODE_TYPES

    def forward(self, batch: ToyBatch, state: FastWeightState | None = None) -> StepOutput:
        if state is not None:
            memory = cast(LinearMemoryState, state.layers[0].memory["mixer"])
            batch = replace(batch, x=batch.x + memory.change[0, 0] @ torch.linspace(-1, 1, 5))
        step = super().forward(batch)
        now = torch.linspace(0, 1, 30).reshape(1, 1, 5, 6).mT * step.loss.detach().sin()
        count = torch.full((1,), batch.step)
        layer = LayerState(memory={"mixer": LinearMemoryState(now, now, None, count)}, conv_tails={"x": now[:, 0]})
        none = torch.zeros(1, 0, dtype=torch.long)
        return step._replace(
            state=FastWeightState((layer, LayerState()), count, OpenChunk(none, count, (layer, LayerState())))
        )


def test_resume_with_carried_fast_weights(tmp_path: Path) -> None:
    resume_from_an_older_step(tmp_path, 5, toy_config(stateful=True, save_every=5, keep_every=5), CarriesFastWeights)
    states = checkpoint.load_carried_states(RunDirectory(tmp_path / "run").step_path(5), NODE_TYPES, Ranks())
    assert {type(state) for state in states} == {FastWeightState}, "one per micro-batch"
    assert {name.partition(".")[2] for name in states[0].tensors()} >= {"0.memory.mixer.change", "0.conv_tails.x"}
    memory = cast(Any, states[0]).layers[0].memory["mixer"]
    assert memory.change is memory.boundary_change


class ReasoningData:
    """Twelve rows of questions, chains and answers, padded independently of the batch."""

    fingerprint = "0" * 64

    def __init__(self) -> None:
        self.rows = batches.reasoning_batch(((5, 6, 4), (3, 3, 3), (4, 0, 5)) * 4)

    def __len__(self) -> int:
        return self.rows.B

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> ReasoningBatch:
        return replace(self.rows.select_rows(rows), epoch=epoch, step=step, ids=tuple(map(str, rows)))


def build_method(name: str) -> nn.Module:
    """A paper's method on the smallest decoder, in float32."""
    return MAKERS[name]().float()


MAKERS: Mapping[str, Callable[[], nn.Module]] = {
    "cot": lambda: Cot(fresh("llama")),
    "nocot": lambda: NoCot(fresh("llama")),
    "icot": lambda: Icot(fresh("llama"), IcotConfig(tokens_removed_per_epoch=1), steps_per_epoch=1),
    "coconut": lambda: Coconut(
        *batches.build_latent_model("llama", num_latents=2, num_iterations=None, projection="none"),
        CoconutConfig(latents_per_step=1, max_stage=2, epochs_per_stage=1),
        steps_per_epoch=1,
    ),
    "codi": lambda: Codi(
        *batches.build_latent_model("llama", num_iterations=None, projection="codi", projection_dropout=0.2),
        DistillationConfig(),
    ),
    "pccot": lambda: Pccot(*batches.build_latent_model("llama"), DistillationConfig()),
    "kava": lambda: batches.build_kava(selection={"policy": "random"}),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", MAKERS)
def test_resume_every_latent_method(tmp_path: Path, name: str) -> None:
    settings = toy_config(steps=4, batch_size=4, micro_batch_size=3, save_every=2)
    resume_from_an_older_step(tmp_path, 2, settings, lambda: build_method(name), data=ReasoningData())
