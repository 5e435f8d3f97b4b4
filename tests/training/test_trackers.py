"""Trackers: what their own packages read back after a run."""

import json
import sqlite3
import time
from pathlib import Path

import pytest

from laconic.errors import UsageError
from laconic.training.trackers import start_tracker
from tests.conftest import needs

Capture = pytest.CaptureFixture[str]
CONFIG = {"method": "kava", "train": {"steps": 2}}


def send_metrics(name: str, run: Path) -> None:
    """Log two updates of a run."""
    run.mkdir(exist_ok=True)
    tracker = start_tracker(name, run, "test-project", CONFIG)  # type: ignore[arg-type]
    tracker.log({"loss": 0.5, "validation/accuracy": 0.25}, 1)
    tracker.log({"loss": 0.25}, 2)
    tracker.finish()


def test_start_tracker_tensorboard(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send_metrics("tensorboard", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [(event.step, event.value) for event in events.Scalars("validation/accuracy")] == [(1, 0.25)]


def test_start_tracker_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    needs("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "records"))
    send_metrics("trackio", tmp_path / "run")
    with sqlite3.connect(next((tmp_path / "records").glob("*.db"))) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    values = [(run, step, json.loads(metrics).get("loss")) for run, step, metrics in rows]
    assert [row for row in values if row[2] is not None] == [("run", 1, 0.5), ("run", 2, 0.25)]
    assert capsys.readouterr().out == ""


@pytest.mark.medium
def test_start_tracker_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    send_metrics("wandb", tmp_path / "run")
    (record,) = (tmp_path / "run").rglob("run-*.wandb")
    while b"validation/accuracy" not in record.read_bytes():  # its own process writes the file
        time.sleep(0.1)
    assert capsys.readouterr().out == ""


def test_start_tracker_reports_a_client_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("wandb")
    import wandb

    def fail(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UsageError, match=r"^--track wandb: No API key .* to log in; or train without --track$"):
        start_tracker("wandb", tmp_path, "test-project", CONFIG)
