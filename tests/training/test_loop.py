"""Training loop: order of rows, micro-batches, validation, best steps, early stop, resume."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.training import EarlyStopConfig
from laconic.errors import BusyError, CorruptArtifactError, DiskError, InputError, UsageError
from laconic.interfaces import StepOutput
from laconic.storage.run_dir import RunDirectory
from laconic.training.checkpoint import StateDictIO
from laconic.training.loop import train
from laconic.training.row_order import compute_update_index
from laconic.training.run import TrainingRun, TrainingSetup
from laconic.training.validation_log import read_validations
from tests.tolerances import RECOMPUTE, error
from tests.training.toy import ToyBatch, ToyData, ToyMethod
from tests.training.toy_runs import flat_parameters, read_metrics, run_training, runs_equal, toy_config


def test_train_order_does_not_depend_on_micro_batches() -> None:
    def order(micro: int | None) -> list[tuple[int, ...]]:
        points = ToyData()
        train(TrainingSetup(ToyMethod(), points, toy_config(micro_batch_size=micro), seed=5))
        rows: dict[tuple[int, int], tuple[int, ...]] = {}
        for piece, epoch, step in points.requests:
            rows[epoch, step] = rows.get((epoch, step), ()) + piece
        return list(rows.values())

    expected = order(None)
    assert all(order(micro) == expected for micro in (1, 3, 8))
    assert [len(rows) for rows in expected] == [8] * 12
    for epoch in range(2):
        assert sorted(sum(expected[5 * epoch : 5 * epoch + 5], ())) == list(range(40))
    assert expected[0] != expected[5]


def test_update_index_is_a_pure_function_of_the_step() -> None:
    assert compute_update_index(toy_config(), 5, 7, 40) == compute_update_index(toy_config(), 5, 7, 40)
    assert compute_update_index(toy_config(), 5, 7, 40).rows != compute_update_index(toy_config(), 6, 7, 40).rows
    assert [len(compute_update_index(toy_config(last_batch="keep"), 0, s, 42).rows) for s in range(7)] == [
        8,
        8,
        8,
        8,
        8,
        2,
        8,
    ]
    assert [compute_update_index(toy_config(last_batch="drop"), 0, s, 42).epoch for s in range(7)] == [
        0,
        0,
        0,
        0,
        0,
        1,
        1,
    ]


@pytest.mark.parametrize("micro", [1, 3])
def test_train_micro_batches_equal_one_batch(micro: int) -> None:
    whole, parts = ToyMethod(0.0), ToyMethod(0.0)
    one = train(TrainingSetup(whole, ToyData(), toy_config(micro_batch_size=None), seed=5))
    many = train(TrainingSetup(parts, ToyData(), toy_config(micro_batch_size=micro), seed=5))
    assert error(flat_parameters(parts), flat_parameters(whole)) <= RECOMPUTE
    assert many.metrics == pytest.approx(one.metrics, rel=RECOMPUTE)


def test_train_writes_metrics(tmp_path: Path) -> None:
    run_training(
        tmp_path / "run", toy_config(log_every=3), validate=lambda epoch: {"accuracy": 0.5, "odd": float("nan")}
    )
    result = read_metrics(tmp_path / "run")
    assert [line["step"] for line in result] == [3, 6, 9, 12, 12]
    assert [line["epoch"] for line in result[:4]] == [0, 1, 1, 2]
    assert result[4]["validation"] == {"accuracy": 0.5, "odd": None}
    assert result[0].keys() == {"step", "epoch", "lr", "tokens", "loss", "square", "distance", "grad_norm"}
    assert result[0]["tokens"] == 8


def test_train_reports_progress() -> None:
    seen: list[tuple[str, int, int]] = []
    train(
        TrainingSetup(ToyMethod(), ToyData(), toy_config(steps=3), seed=5),
        report_progress=lambda *values: seen.append(values),
    )
    assert [(done, total) for _, done, total in seen] == [(1, 3), (2, 3), (3, 3)]
    assert all(name in seen[0][0] for name in ("loss", "square", "distance", "tokens/s"))


class RareMetric(ToyMethod):
    """Reports a mean over a subset that is empty in the first update, and a Python number."""

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        step = super().forward(batch, state)
        metrics: Any = {**step.metrics, "rare": torch.ones(batch.step).mean(), "one": 1.0, "count": 2}
        return step._replace(metrics=metrics)


def test_train_goes_on_with_a_metric_that_is_nan(tmp_path: Path) -> None:
    lines: list[str] = []
    method = RareMetric()
    result, _ = run_training(
        tmp_path / "run", toy_config(steps=3), method=method, report_progress=lambda text, *_: lines.append(text)
    )
    assert [line["rare"] for line in read_metrics(tmp_path / "run")] == [None, 3.0, 3.0]
    assert [line["one"] for line in read_metrics(tmp_path / "run")] == [3.0] * 3
    assert " · rare nan · " in lines[0]
    assert not (tmp_path / "run/incidents").exists()
    assert result.metrics["rare"] == 3.0
    first = train(TrainingSetup(RareMetric(), ToyData(), toy_config(steps=1)))
    assert "rare" not in first.metrics
    assert first.metrics["loss"] > 0


def validation(*values: float) -> Any:
    remaining = iter(values)
    return lambda epoch: {"accuracy": next(remaining)}


def test_train_retains_the_best_steps(tmp_path: Path) -> None:
    settings = toy_config(validate_every=2, best_metric="accuracy", save_every=100)
    result, _ = run_training(tmp_path / "run", settings, validate=validation(0.1, 0.9, 0.3, 0.9, 0.2, 0.4))
    assert result.best == (0.9, 4)
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 10, 12]  # the best, and always the last two
    settings = toy_config(
        validate_every=2, best_metric="accuracy", best_mode="min", keep_best=2, keep_every=3, save_every=3
    )
    result, _ = run_training(tmp_path / "less", settings, validate=validation(0.4, 0.9, 0.1, float("nan"), 0.8, 0.7))
    assert result.best == (0.1, 6)
    assert RunDirectory(tmp_path / "less").step_numbers() == [2, 3, 6, 9, 10, 12]


def test_train_commits_a_step_before_it_is_validated(tmp_path: Path) -> None:
    settings = toy_config(validate_every=5, save_every=100)

    def validate(epoch: int) -> dict[str, float]:
        raise InputError("the validation failed")

    with pytest.raises(InputError, match="the validation failed"):
        run_training(tmp_path / "run", settings, validate=validate)
    assert RunDirectory(tmp_path / "run").step_numbers() == [5]
    for name in ("run", "never"):
        run_training(tmp_path / name, settings, validate=lambda epoch: {"accuracy": 0.5})
    assert runs_equal(tmp_path / "run", tmp_path / "never")
    assert (tmp_path / "run/validations.json").read_bytes() == (tmp_path / "never/validations.json").read_bytes()


def test_train_checks_free_space_before_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 70, 30))  # type: ignore[attr-defined]
    points = ToyData()
    with pytest.raises(DiskError, match="required to write"):
        run_training(tmp_path / "run", data=points)
    assert points.requests == []


def test_train_step_without_the_base_model_needs_less_space() -> None:
    method = ToyMethod()
    frozen = next(method.parameters()).requires_grad_(False)
    whole, adapter = (
        TrainingRun(TrainingSetup(method, ToyData(), toy_config(trainable=name))) for name in ("full", "lora")
    )
    assert whole.step_bytes - adapter.step_bytes == frozen.nbytes


def test_train_does_not_repeat_a_validation(tmp_path: Path) -> None:
    settings = toy_config(validate_every=4, best_metric="accuracy")
    first, _ = run_training(tmp_path / "run", settings, validate=validation(0.9, 0.1, 0.2))
    before = read_metrics(tmp_path / "run")
    again, _ = run_training(tmp_path / "run", settings, validate=validation())
    assert (again.best, again.validation) == (first.best, first.validation) == ((0.9, 4), {"accuracy": 0.2})
    with pytest.warns(UserWarning, match="later steps 12"):
        run_training(tmp_path / "run", settings, validate=validation(0.2), resume=8)
    assert read_metrics(tmp_path / "run") == before


def test_train_validates_again_with_another_validation(tmp_path: Path) -> None:
    settings = toy_config(validate_every=4, best_metric="accuracy")
    run_training(tmp_path / "run", settings, validate=validation(0.9, 0.1, 0.2))
    other = {"held_out": "0" * 64}
    with pytest.warns(UserWarning, match="measures something else than before; earlier results are dropped"):
        result, _ = run_training(tmp_path / "run", settings, validate=validation(0.3), fingerprints=other)
    assert (result.best, result.validation) == ((0.3, 12), {"accuracy": 0.3})


def test_train_ignores_a_damaged_log_of_validations(tmp_path: Path) -> None:
    run_training(tmp_path / "run", validate=validation(0.5))
    path = tmp_path / "run/validations.json"
    path.write_text(path.read_text().replace("0.5", "0.6"))
    with pytest.raises(CorruptArtifactError, match=r"validations.json: was changed"):
        read_validations(tmp_path / "run")
    with pytest.warns(UserWarning, match=r"validations.json: was changed"):
        result, _ = run_training(tmp_path / "run", validate=validation(0.5))
    assert result.validation == {"accuracy": 0.5}


def test_train_refuses_an_unknown_metric() -> None:
    for changed in ({"best_metric": "f1"}, {"early_stop": EarlyStopConfig(metric="f1", at_least=1)}):
        with pytest.raises(UsageError, match=r"f1 is not a metric.*accuracy"):
            train(
                TrainingSetup(ToyMethod(), ToyData(), toy_config(**changed)), validate=lambda epoch: {"accuracy": 1.0}
            )


def test_train_stops_early(tmp_path: Path) -> None:
    settings = toy_config(validate_every=2, early_stop=EarlyStopConfig(metric="accuracy", at_least=0.8))
    result, _ = run_training(tmp_path / "run", settings, validate=validation(0.1, 0.5, 0.8))
    assert (result.steps, result.validation) == (6, {"accuracy": 0.8})
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 6]
    again, _ = run_training(tmp_path / "run", settings, validate=validation())
    assert again.steps == 6  # and is not continued by the same command


def test_train_validation_changes_nothing(tmp_path: Path) -> None:
    def validate(epoch: int) -> dict[str, float]:
        assert not toy.training
        return {"accuracy": torch.rand(()).item()}

    toy, plain = ToyMethod(), ToyMethod()
    train(TrainingSetup(toy, ToyData(), toy_config(validate_every=1), seed=5), validate=validate)
    train(TrainingSetup(plain, ToyData(), toy_config(), seed=5))
    assert toy.training
    assert torch.equal(flat_parameters(toy), flat_parameters(plain))


def test_train_max_grad_norm_0_does_not_clip() -> None:
    free, wide = ToyMethod(), ToyMethod()
    for toy, clip in ((free, 0.0), (wide, 1e9)):
        train(TrainingSetup(toy, ToyData(), toy_config(max_grad_norm=clip), seed=5))
    assert torch.equal(flat_parameters(free), flat_parameters(wide))


def test_train_clears_the_optimizer_state() -> None:
    toy, plain = ToyMethod(0.0), ToyMethod(0.0)
    plain.reset_steps = ()
    toy.reset_steps = (4,)
    for method in (toy, plain):
        train(TrainingSetup(method, ToyData(), toy_config(), seed=5))
    assert not torch.equal(flat_parameters(toy), flat_parameters(plain))
    fresh = ToyMethod(0.0)
    train(TrainingSetup(fresh, ToyData(), toy_config(steps=4, lr_schedule="constant", warmup_ratio=0.0), seed=5))
    again = ToyMethod(0.0)
    again.reset_steps = (0,)
    train(TrainingSetup(again, ToyData(), toy_config(steps=4, lr_schedule="constant", warmup_ratio=0.0), seed=5))
    assert torch.equal(flat_parameters(fresh), flat_parameters(again))


def test_train_refuses_fewer_rows_than_a_batch() -> None:
    with pytest.raises(InputError, match=r"7 rows .* batch_size = 8"):
        train(TrainingSetup(ToyMethod(), ToyData(7), toy_config()))


def test_train_resume_never_and_by_step(tmp_path: Path) -> None:
    run_training(tmp_path / "run")
    with pytest.raises(BusyError, match="/run already has checkpoints"):
        run_training(tmp_path / "run", resume="never")
    with pytest.raises(UsageError, match="no checkpoint of step 5; available: 8, 12"):
        run_training(tmp_path / "run", resume=5)
    with pytest.warns(UserWarning, match="later steps 12"):
        result, _ = run_training(tmp_path / "run", resume=8)
    assert result.steps == 12


def test_train_refuses_to_resume_with_other_data(tmp_path: Path) -> None:
    run_training(tmp_path / "run")
    with pytest.raises(
        CorruptArtifactError, match=r"step-000012 was trained with other training rows \(.*, not .*\); restore"
    ):
        run_training(tmp_path / "run", data=ToyData(seed=8))
    with pytest.raises(CorruptArtifactError, match="step-000008 was trained with other training rows"):
        run_training(tmp_path / "run", data=ToyData(seed=8), resume=8)
    assert RunDirectory(tmp_path / "run").step_numbers() == [8, 12], "a refused run discards nothing"


def test_train_refuses_to_resume_with_other_parameters(tmp_path: Path) -> None:
    class WholeModelIO(StateDictIO):
        def load(self, folder: Path) -> None:
            pass

    run_training(tmp_path / "run")
    toy = ToyMethod()
    toy.first.requires_grad_(False)
    with pytest.raises(CorruptArtifactError, match=r"optimizer groups of \[2, 4\] tensors, this run trains \[1, 3\]"):
        run_training(tmp_path / "run", method=toy, model_io=WholeModelIO(toy))


def test_train_requires_the_lock(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for _ in range(2):  # without and with its folder
        with pytest.raises(ValueError, match=r"requires the lock; call it inside `with run\.lock"):
            train(TrainingSetup(ToyMethod(), ToyData(), toy_config(steps=1)), run=run)
        run.steps_folder.mkdir(parents=True, exist_ok=True)
    assert not (run.path / "metrics.jsonl").exists(), "refused before the first update"


def test_deterministic_kernels_are_restored() -> None:
    seen: list[bool] = []
    train(
        TrainingSetup(ToyMethod(), ToyData(), toy_config(steps=1)),
        validate=lambda epoch: seen.append(torch.are_deterministic_algorithms_enabled()) or {"accuracy": 1.0},
    )
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        train(TrainingSetup(ToyMethod(), ToyData(), toy_config(steps=1)))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
