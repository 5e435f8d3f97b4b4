"""`laconic demo read` on SmolLM2-135M-Instruct."""

import json
from pathlib import Path

import pytest

from tests.conftest import RunCli


@pytest.mark.real
@pytest.mark.slow
def test_demo_read_smollm2(run_cli: RunCli, smollm2: Path, tmp_path: Path) -> None:
    result = run_cli("demo", "read", "--model", str(smollm2), "--out", str(tmp_path), "--format", "json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    none, full, memory, last = report["rows"]
    assert sum(full["correct"]) >= 2 > sum(none["correct"])
    assert memory["positions"] == last["positions"] == report["tokens"] // 8
    assert memory["num_bytes"] < full["num_bytes"] / 7
    assert full["loss"] < memory["loss"] < last["loss"] < none["loss"]
    assert "Ogilvy" in (tmp_path / "report.html").read_text(encoding="utf-8")
