"""metrics.jsonl: values of a line, the start of a resumed run, and the tracker's copy."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from laconic.training.metrics import MetricsWriter


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


def test_metrics_writer_copies_to_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    trackio = ModuleType("trackio")
    trackio.init = lambda **named: calls.append(named)  # type: ignore[attr-defined]
    trackio.log = calls.append  # type: ignore[attr-defined]
    trackio.finish = lambda: calls.append("finish")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    (tmp_path / "run").mkdir()
    metrics = MetricsWriter(tmp_path / "run" / "metrics.jsonl", tracker_project="project")
    metrics.write({"step": 1, "loss": 0.5, "validation": {"a": 1.0}})
    metrics.close()
    assert calls == [{"project": "project", "name": "run"}, {"step": 1, "loss": 0.5}, "finish"]


def test_metrics_writer_without_tracker_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ImportError) as caught:
        MetricsWriter(tmp_path / "metrics.jsonl", tracker_project="project")
    assert caught.value.name == "trackio"
