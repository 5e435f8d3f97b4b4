"""The loop: its order of rows, micro-batches, validation, the best steps, ends, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.config.training import EarlyStopConfig
from laconic.errors import BusyError, CorruptArtifactError, InputError, UsageError
from laconic.storage.run_dir import RunDirectory
from laconic.training.loop import train
from laconic.training.step import compute_update_index
from tests.tolerances import RECOMPUTE, error
from tests.training.ground import how, lines, parameters, trained
from tests.training.toy import Points, Toy


def test_the_order_does_not_depend_on_micro_batches() -> None:
    def order(micro: int | None) -> list[tuple[int, ...]]:
        points = Points()
        train(Toy(), points, how(micro=micro), seed=5)
        rows: dict[tuple[int, int], tuple[int, ...]] = {}
        for piece, epoch, step in points.read:
            rows[epoch, step] = rows.get((epoch, step), ()) + piece
        return list(rows.values())

    found = order(None)
    assert all(order(micro) == found for micro in (1, 3, 8))
    assert [len(rows) for rows in found] == [8] * 12
    for epoch in range(2):
        assert sorted(sum(found[5 * epoch : 5 * epoch + 5], ())) == list(range(40))
    assert found[0] != found[5]


def test_rows_of_an_update_are_a_function_of_its_number() -> None:
    assert compute_update_index(how(), 5, 7, 40) == compute_update_index(how(), 5, 7, 40)
    assert compute_update_index(how(), 5, 7, 40).rows != compute_update_index(how(), 6, 7, 40).rows
    assert [len(compute_update_index(how(last_batch="keep"), 0, s, 42).rows) for s in range(7)] == [8, 8, 8, 8, 8, 2, 8]
    assert [compute_update_index(how(last_batch="drop"), 0, s, 42).epoch for s in range(7)] == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("micro", [1, 3])
def test_micro_batches_are_one_batch(micro: int) -> None:
    whole, parts = Toy(0.0), Toy(0.0)
    one = train(whole, Points(), how(micro=None), seed=5)
    many = train(parts, Points(), how(micro=micro), seed=5)
    assert error(parameters(parts), parameters(whole)) <= RECOMPUTE
    assert many.metrics == pytest.approx(one.metrics, rel=RECOMPUTE)


def test_metrics(tmp_path: Path) -> None:
    trained(tmp_path / "run", how(log_every=3), validate=lambda epoch: {"accuracy": 0.5, "odd": float("nan")})
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == [3, 6, 9, 12, 12]
    assert [line["epoch"] for line in found[:4]] == [0, 1, 1, 2]
    assert found[4]["validation"] == {"accuracy": 0.5, "odd": None}
    assert found[0].keys() == {"step", "epoch", "lr", "tokens", "loss", "square", "distance", "grad_norm"}
    assert found[0]["tokens"] == 8


def test_progress_is_shown() -> None:
    seen: list[tuple[str, int, int]] = []
    train(Toy(), Points(), how(steps=3), seed=5, report_progress=lambda *shown: seen.append(shown))
    assert [(done, total) for _, done, total in seen] == [(1, 3), (2, 3), (3, 3)]
    assert all(name in seen[0][0] for name in ("loss", "square", "distance", "tokens/s"))


def validation(*values: float) -> Any:
    given = iter(values)
    return lambda epoch: {"accuracy": next(given)}


def test_the_best_are_kept(tmp_path: Path) -> None:
    settings = how(validate_every=2, best="accuracy", save_every=100)
    found, _ = trained(tmp_path / "run", settings, validate=validation(0.1, 0.9, 0.3, 0.9, 0.2, 0.4))
    assert found.best == (0.9, 4)
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 12]
    settings = how(validate_every=2, best="accuracy", best_is="smallest", keep_best=2, keep_every=3, save_every=3)
    found, _ = trained(tmp_path / "less", settings, validate=validation(0.4, 0.9, 0.1, float("nan"), 0.8, 0.7))
    assert found.best == (0.1, 6)
    assert RunDirectory(tmp_path / "less").step_numbers() == [2, 3, 6, 9, 12]


def test_a_metric_that_is_not_there() -> None:
    for changed in ({"best": "f1"}, {"stop_when": EarlyStopConfig(metric="f1", at_least=1)}):
        with pytest.raises(UsageError, match=r"^f1: no such number in the validation; it gives accuracy$"):
            train(Toy(), Points(), how(**changed), validate=lambda epoch: {"accuracy": 1.0})


def test_the_end_comes_early(tmp_path: Path) -> None:
    settings = how(validate_every=2, stop_when=EarlyStopConfig(metric="accuracy", at_least=0.8))
    found, _ = trained(tmp_path / "run", settings, validate=validation(0.1, 0.5, 0.8))
    assert (found.steps, found.validation) == (6, {"accuracy": 0.8})
    assert RunDirectory(tmp_path / "run").step_numbers() == [4, 6]


def test_validation_leaves_no_trace(tmp_path: Path) -> None:
    def validate(epoch: int) -> dict[str, float]:
        assert not toy.training
        return {"accuracy": torch.rand(()).item()}

    toy, plain = Toy(), Toy()
    train(toy, Points(), how(validate_every=1), seed=5, validate=validate)
    train(plain, Points(), how(), seed=5)
    assert toy.training
    assert torch.equal(parameters(toy), parameters(plain))


def test_0_clips_nothing() -> None:
    free, wide = Toy(), Toy()
    for toy, clip in ((free, 0.0), (wide, 1e9)):
        train(toy, Points(), how(clip=clip), seed=5)
    assert torch.equal(parameters(free), parameters(wide))


def test_a_restart_forgets_the_moments() -> None:
    toy, plain = Toy(0.0), Toy(0.0)
    plain.restart_at = ()
    toy.restart_at = (4,)
    for method in (toy, plain):
        train(method, Points(), how(), seed=5)
    assert not torch.equal(parameters(toy), parameters(plain))
    fresh = Toy(0.0)
    train(fresh, Points(), how(steps=4, schedule="constant", warmup=0.0), seed=5)
    again = Toy(0.0)
    again.restart_at = (0,)
    train(again, Points(), how(steps=4, schedule="constant", warmup=0.0), seed=5)
    assert torch.equal(parameters(fresh), parameters(again))


def test_too_few_rows() -> None:
    with pytest.raises(InputError, match=r"^train: 7 rows, a batch has 8; take a smaller batch or more rows$"):
        train(Toy(), Points(7), how())


def test_resume_never_and_a_step_by_name(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    with pytest.raises(BusyError, match=r"/run has 2 steps; resume, or choose another folder$"):
        trained(tmp_path / "run", resume="never")
    with pytest.raises(UsageError, match=r"/run has no step 5; there: 8, 12$"):
        trained(tmp_path / "run", resume=5)
    with pytest.warns(UserWarning, match=r"/run: steps 12 are put aside"):
        found, _ = trained(tmp_path / "run", resume=8)
    assert found.steps == 12


def test_other_rows_are_not_taken_for_these(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    with pytest.raises(
        CorruptArtifactError, match=r"step-000012 was made with data 0+7, this run has 0+8; take those again$"
    ):
        trained(tmp_path / "run", source=Points(seed=8))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    class Whole:
        def __init__(self, toy: Toy) -> None:
            self.toy = toy

        def save(self, files: Any) -> None:
            files.tensors("model.safetensors", self.toy.state_dict())

        def load(self, folder: Path) -> None:
            pass

    trained(tmp_path / "run")
    toy = Toy()
    toy.first.requires_grad_(False)
    with pytest.raises(
        CorruptArtifactError, match=r"an optimizer of groups of \[2, 4\] tensors, this run trains \[1, 3\]; "
    ):
        trained(tmp_path / "run", method=toy, model=Whole(toy))


def test_a_run_that_is_not_held(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.steps_folder.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^commit: the run is not held; write inside `with run\.held\(\):`$"):
        train(Toy(), Points(), how(steps=1), run=run)


def test_deterministic_kernels_are_on_inside_only() -> None:
    seen: list[bool] = []
    train(
        Toy(),
        Points(),
        how(steps=1),
        validate=lambda epoch: seen.append(torch.are_deterministic_algorithms_enabled()) or {"accuracy": 1.0},
    )
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
