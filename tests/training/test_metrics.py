"""metrics.jsonl: values of a line, the start of a resumed run, and the tracker's copy."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from laconic.training.metrics import MetricsWriter
from laconic.training.run import format_metrics


def test_metrics_writer_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsWriter(path)
    metrics.write({"step": 1, "loss": float("nan"), "validation": {"a": float("inf"), "b": 0.5}})
    length = metrics.flush_to_disk()
    assert length == path.stat().st_size
    metrics.write({"step": 2})
    metrics.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": None, "validation": {"a": None, "b": 0.5}},
        {"step": 2},
    ]
    again = MetricsWriter(path, length)
    assert again.flush_to_disk() == length
    again.write({"step": 2, "loss": 1.0})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    assert "1.0" in path.read_text()


def test_metrics_writer_warns_about_lost_lines(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="has 0 bytes.*99.*lost"):
        metrics = MetricsWriter(tmp_path / "metrics.jsonl", 99)
    metrics.write({"step": 1})
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":1}\n'


def test_metrics_writer_warns_about_changed_lines(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsWriter(path)
    metrics.write({"step": 1, "loss": 0.5})
    length, sha256 = metrics.flush_to_disk(), metrics.sha256
    metrics.write({"step": 2})
    metrics.close()
    again = MetricsWriter(path, length, sha256)
    again.close()
    assert not recwarn
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.4"))
    with pytest.warns(UserWarning, match=r"metrics\.jsonl was changed after it was written"):
        MetricsWriter(path, length, sha256).close()


class RecordingTracker:
    """Stores what it receives."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append((step, dict(metrics)))

    def finish(self) -> None:
        self.calls.append("finish")


def test_metrics_writer_copies_to_the_tracker(tmp_path: Path) -> None:
    tracker = RecordingTracker()
    metrics = MetricsWriter(tmp_path / "metrics.jsonl", tracker=tracker)
    metrics.write({"step": 1, "loss": 0.5, "note": "x", "bad": float("nan"), "validation": {"a": 1.0}})
    metrics.close()
    assert tracker.calls == [(1, {"loss": 0.5, "validation/a": 1.0}), "finish"]


def test_format_metrics_does_not_round_whole_numbers() -> None:
    metrics = {"loss": 5.53528, "state_bytes": 58168.0, "nan": math.nan, "large": 1e30, "cut": 1.0}
    assert format_metrics(metrics, 4) == ["loss 5.535", "state_bytes 58,168", "nan nan", "large 1e+30"]
