"""NaN and infinity anywhere in an update: the run stops with a report that can be replayed, or skips the update."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.errors import NonFiniteError
from laconic.interfaces import StepOutput
from laconic.storage.run_dir import RunDirectory
from laconic.training import run as training_run
from laconic.training.loop import replay, train
from laconic.training.optim import build_adamw
from laconic.training.run import TrainingSetup
from tests.training.toy import ToyBatch, ToyData, ToyMethod
from tests.training.toy_runs import flat_parameters, read_metrics, run_training, runs_equal, toy_config
from tests.trust.nonfinite_cases import BAD_STEP, CASES, NonFiniteMethod, check_run_stops


@pytest.mark.parametrize("case", CASES)
def test_nonfinite_update_stops_the_run_and_replay_gives_the_same_report(tmp_path: Path, case: str) -> None:
    report = check_run_stops(tmp_path, case)
    assert report["step"] == BAD_STEP + 1
    assert report["epoch"] == 1
    assert sorted(map(int, report["ids"])) == sorted(report["rows"])
    assert len(report["ids"]) == 8
    assert CASES[case][1] in report["first"]
    bad = [name for name, value in report["metrics"].items() if value is None]
    is_stateful = case in ("state", "fast weight")
    if is_stateful:
        assert bad == ["state"]
    else:
        assert bad
    if case != "parameter":
        assert all(value is not None for value in report["largest"].values())
        settings = toy_config(stateful=is_stateful, save_every=100)
        again = replay(
            TrainingSetup(NonFiniteMethod(case), ToyData(), settings, seed=5),
            run=RunDirectory(tmp_path / "run"),
            step=BAD_STEP + 1,
        )
        assert again == report


def test_nonfinite_stops_the_resumed_run_at_the_same_step(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"^step 6: loss, square, distance, grad_norm not finite"):
            run_training(tmp_path / "run", method=NonFiniteMethod("input"))
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 5]


def test_nonfinite_stops_a_run_without_a_directory() -> None:
    with pytest.raises(NonFiniteError, match=r"the update was not applied, first in NonFiniteMethod: aten::mul"):
        train(TrainingSetup(NonFiniteMethod("input"), ToyData(), toy_config()))


def test_nonfinite_skip_leaves_out_at_most_three_updates(tmp_path: Path) -> None:
    settings = toy_config(on_nonfinite="skip")
    toy = NonFiniteMethod("input", (2, 5, 6))
    result, _ = run_training(tmp_path / "run", settings, method=toy)
    assert result.num_skipped == 3
    assert bool(flat_parameters(toy).isfinite().all())
    logged = read_metrics(tmp_path / "run")
    assert [line["step"] for line in logged if "nonfinite" in line] == [3, 6, 7]
    assert all(logged[i]["loss"] is None and logged[i]["nonfinite"] == 1 for i in (2, 5, 6))
    with pytest.raises(NonFiniteError, match=r"^step 9: loss"):
        run_training(tmp_path / "more", settings, method=NonFiniteMethod("input", (2, 5, 6, 8)))


def test_nonfinite_skip_counts_recent_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "SKIP_WINDOW", 6)
    method = NonFiniteMethod("input", (0, 1, 2, 8))
    result, _ = run_training(tmp_path / "run", toy_config(on_nonfinite="skip"), method=method)
    assert result.num_skipped == 4, "all skipped updates are reported"


def test_nonfinite_skips_are_counted_over_a_resume(tmp_path: Path) -> None:
    settings = toy_config(on_nonfinite="skip", keep_every=4)
    with pytest.raises(NonFiniteError, match=r"^step 9: "):
        run_training(tmp_path / "run", settings, method=NonFiniteMethod("input", (1, 2, 3, 8)))
    with pytest.raises(NonFiniteError, match=r"^step 9: "):
        run_training(tmp_path / "run", settings, method=NonFiniteMethod("input", (1, 2, 3, 8)))


def test_nonfinite_skip_does_not_depend_on_what_was_not_finite() -> None:
    one, other = NonFiniteMethod("input", (2,)), NonFiniteMethod("loss", (2,))
    for toy in (one, other):
        train(TrainingSetup(toy, ToyData(), toy_config(on_nonfinite="skip"), seed=5))
    assert torch.equal(flat_parameters(one), flat_parameters(other))


def test_nonfinite_skip_is_no_step_of_the_optimizer() -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def build_optimizer(method: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
        optimizers.append(build_adamw(method, config))
        return optimizers[-1]

    toy, config = NonFiniteMethod("input", (2,)), toy_config(on_nonfinite="skip")
    result = train(TrainingSetup(toy, ToyData(), config, build_optimizer=build_optimizer))
    assert {int(state["step"]) for state in optimizers[0].state.values()} == {result.steps - 1}


class LargeLoss(ToyMethod):
    """Its scaled gradients overflow in float16 until the scale is low enough."""

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        step = super().forward(batch, state)
        return step._replace(loss=step.loss * 1e35)


def test_overflow_lowers_the_loss_scale(tmp_path: Path) -> None:
    settings = toy_config(precision="float16", max_grad_norm=0.0, learning_rate=1e-9)
    toy = LargeLoss()
    run_training(tmp_path / "run", settings, method=toy)
    logged = read_metrics(tmp_path / "run")
    overflown = [line["step"] for line in logged if "overflow" in line]
    assert overflown
    assert all(math.isfinite(line["loss"]) for line in logged)
    assert not (tmp_path / "run" / "incidents").exists()
    run_training(tmp_path / "again", settings, method=LargeLoss())
    assert runs_equal(tmp_path / "run", tmp_path / "again")


def test_overflow_below_a_scale_of_one_is_nonfinite() -> None:
    class InfiniteGradient(ToyMethod):
        def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
            step = super().forward(batch, state)
            zero = (self.second.bias - self.second.bias.detach()).sum()
            return step._replace(loss=step.loss + zero.abs().sqrt())

    with pytest.raises(NonFiniteError, match=r"^step 18: grad_norm not finite"):
        train(TrainingSetup(InfiniteGradient(), ToyData(), toy_config(precision="float16", steps=40)))
