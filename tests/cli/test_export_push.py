"""`laconic export --push` of what is no run."""

from pathlib import Path

import pytest

from tests.conftest import RunCli


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        ("runs/nc", 66, "runs/nc: no such folder; --push uploads a run of laconic train"),
        ("stories260k", 2, "--push: stories260k is not a run of laconic train"),
    ],
)
def test_export_push_refuses_what_is_no_run(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_cli("export", model, "--out", tmp_path / "out", "--push", "me/nc", "--dry-run")
    assert (result.code, message in result.err) == (code, True), result.err
