"""R6: NaN and infinity anywhere in an update; and what may be left out."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.errors import NonFiniteError
from laconic.interfaces import StepOutput
from laconic.storage.run_dir import RunDirectory
from laconic.training import run as training_run
from laconic.training.loop import replay, train
from tests.training.toy import ToyBatch, ToyData, ToyMethod
from tests.training.toy_runs import flat_parameters, read_metrics, run_training, runs_equal, toy_config
from tests.trust.nonfinite_cases import AT, CASES, Spoilt, stops


@pytest.mark.parametrize("what", CASES)
def test_the_run_stops_and_replay_repeats_it(tmp_path: Path, what: str) -> None:
    about = stops(tmp_path, what)
    assert about["step"] == AT + 1
    assert about["epoch"] == 1
    assert sorted(map(int, about["ids"])) == sorted(about["rows"])
    assert len(about["ids"]) == 8
    assert CASES[what][1] in about["first"]
    spoilt = [name for name, value in about["numbers"].items() if value is None]
    assert spoilt == ["state"] if what in ("state", "fast weight") else spoilt
    assert spoilt
    if what != "parameter":
        assert all(value is not None for value in about["largest"].values())
        settings = toy_config(stateful=what in ("state", "fast weight"), save_every=100)
        again = replay(Spoilt(what), ToyData(), settings, run=RunDirectory(tmp_path / "run"), step=AT + 1, seed=5)
        assert again == about


def test_the_same_command_meets_it_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"^step 6: loss, square, distance, grad_norm not finite"):
            run_training(tmp_path / "run", method=Spoilt("input"))
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 5]


def test_without_a_folder() -> None:
    with pytest.raises(NonFiniteError, match=r"the update was not applied, first in Spoilt: aten::mul"):
        train(Spoilt("input"), ToyData(), toy_config())


def test_skipping(tmp_path: Path) -> None:
    settings = toy_config(on_nonfinite="skip")
    toy = Spoilt("input", (2, 5, 6))
    found, _ = run_training(tmp_path / "run", settings, method=toy)
    assert found.num_skipped == 3
    assert bool(flat_parameters(toy).isfinite().all())
    logged = read_metrics(tmp_path / "run")
    assert [line["step"] for line in logged if "nonfinite" in line] == [3, 6, 7]
    assert all(logged[i]["loss"] is None and logged[i]["nonfinite"] == 1 for i in (2, 5, 6))
    with pytest.raises(NonFiniteError, match=r"^step 9: loss"):
        run_training(tmp_path / "more", settings, method=Spoilt("input", (2, 5, 6, 8)))


def test_a_skip_is_long_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "SKIP_WINDOW", 6)
    run_training(tmp_path / "run", toy_config(on_nonfinite="skip"), method=Spoilt("input", (0, 1, 2, 8)))


def test_skips_are_counted_over_a_resume(tmp_path: Path) -> None:
    settings = toy_config(on_nonfinite="skip", keep_every=4)
    with pytest.raises(NonFiniteError, match=r"^step 9: "):
        run_training(tmp_path / "run", settings, method=Spoilt("input", (1, 2, 3, 8)))
    with pytest.raises(NonFiniteError, match=r"^step 9: "):
        run_training(tmp_path / "run", settings, method=Spoilt("input", (1, 2, 3, 8)))


def test_a_skip_changes_nothing_but_its_place(tmp_path: Path) -> None:
    """The optimizer counts what was applied; the rate goes by the step."""
    one, other = Spoilt("input", (2,)), Spoilt("loss", (2,))
    for toy in (one, other):
        train(toy, ToyData(), toy_config(on_nonfinite="skip"), seed=5)
    assert torch.equal(flat_parameters(one), flat_parameters(other))


class Large(ToyMethod):
    """In float16 its scaled gradients overflow until the scale has come down."""

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        step = super().forward(batch, state)
        return step._replace(loss=step.loss * 1e35)


def test_an_overflow_is_the_scalers(tmp_path: Path) -> None:
    settings = toy_config(precision="float16", max_grad_norm=0.0, learning_rate=1e-9)
    toy = Large()
    run_training(tmp_path / "run", settings, method=toy)
    logged = read_metrics(tmp_path / "run")
    overflown = [line["step"] for line in logged if "overflow" in line]
    assert overflown
    assert all(math.isfinite(line["loss"]) for line in logged)
    assert not (tmp_path / "run" / "incidents").exists()
    run_training(tmp_path / "again", settings, method=Large())
    assert runs_equal(tmp_path / "run", tmp_path / "again")


def test_below_a_scale_of_one_it_is_an_incident() -> None:
    class Larger(ToyMethod):
        def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
            step = super().forward(batch, state)
            zero = (self.second.bias - self.second.bias.detach()).sum()
            return step._replace(loss=step.loss + zero.abs().sqrt())

    with pytest.raises(NonFiniteError, match=r"^step 18: grad_norm not finite"):
        train(Larger(), ToyData(), toy_config(precision="float16", steps=40))
