"""`laconic audit` as a user gives it: the table, what is stored, controls, the report, and what is refused."""

import json
from pathlib import Path

import pytest

from tests.conftest import RunCli, call_cli
from tests.tiny_recipes import TINY_DOCUMENT_RECIPE, TINY_RECIPE

RECIPE = TINY_RECIPE.replace("valid_rows = 20", "valid_rows = 20, test_rows = 16")
RECIPE = RECIPE.replace("[validation]\nmax_rows = 4\nmax_tokens = 6\n", "")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one step: KaVa, pause tokens, and one that writes its chain."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.toml").write_text(RECIPE)
    for name, keys in (
        ("kava", ()),
        ("pause", ("method=pccot", "latents.jacobi_iterations=0", 'latents.projection="none"')),
        ("chain", ("method=cot",)),
    ):
        out = ("--out", folder / name, "train.steps=1", "train.batch_size=2", "data.digits.train_rows=100")
        assert call_cli("train", folder / "tiny.toml", *out, *keys) == 0
    (folder / "lm").mkdir()
    (folder / "lm" / "recipe.toml").write_text(TINY_DOCUMENT_RECIPE)
    return folder


@pytest.fixture(autouse=True)
def in_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


@pytest.mark.medium
def test_audit_with_a_control_as_json_and_again_from_disk(run_cli: RunCli, runs: Path) -> None:
    first = run_cli("audit", "kava", "--control", "pause", "--format", "json")
    assert first.code == 0, first.err
    data = json.loads(first.out)
    assert (data["schema"], data["run"], data["questions"], data["num_tests"]) == (1, "kava", 16, 14)
    assert [control["name"] for control in data["controls"]] == ["pause"]
    assert {c["name"] for c in data["conditions"]} >= {"swap vectors", "swap cache", "first 1", "0 iterations"}
    assert data["verdict"]["name"] in ("undetermined", "presence", "not shown")
    assert any("raise --limit" in note for note in data["notes"])  # 16 questions show large losses only
    stored = next((runs / "kava" / "evaluations").glob("audit-*")) / "result.json"
    assert json.loads(stored.read_text())["figures"]["protocol"] == data["protocol"]
    before = stored.stat().st_mtime_ns
    again = run_cli("audit", "kava", "--control", "pause")
    assert "Verdict: " in again.out
    assert "control pause" in again.out
    assert "another question's thoughts" in again.out
    assert stored.stat().st_mtime_ns == before

    evaluated = json.loads(run_cli("evaluate", "kava", "pause", "--format", "json", "--limit", 300).out)
    accuracies = {row["run"]: row["accuracy"]["mean"] for row in evaluated["datasets"][0]["runs"]}
    assert accuracies == {"kava": data["accuracy"]["mean"], "pause": data["controls"][0]["accuracy"]["mean"]}

    page = runs / "report.html"
    assert run_cli("report", "kava", "--out", page).code == 0
    text = page.read_text()
    assert "Audit of kava on test" in text
    assert "without the controls of laconic audit" in text
    assert "Some runs have only 1 seed; another seed&#39;s result may lie outside these intervals." in text
    assert data["verdict"]["text"].partition(";")[0][:40] in text


@pytest.mark.medium
def test_audit_of_pause_tokens_finds_no_use_of_identical_vectors(run_cli: RunCli) -> None:
    data = json.loads(run_cli("audit", "pause", "--format", "json").out)
    swap = next(c for c in data["conditions"] if c["name"] == "swap vectors")
    assert (swap["changed_share"], swap["change"]["mean"], swap["change"]["p"]) == (0, 0, 1)
    assert not any("iterations" in c["name"] for c in data["conditions"])


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("chain",), 2, "method cot has no latents; give a run of codi, pccot, kava or coconut"),
        (("kava", "--limit", "9"), 66, "9 questions; with 13 tests no effect could be significant on fewer than 10"),
        (("kava", "--limit", "1"), 2, "must be at least 2"),
        (("lm",), 2, "method lm reads documents; give a run that answers questions"),
        (("missing",), 66, "missing: no such local folder"),
        (("stories260k",), 66, "stories260k is a model; give a run"),
        ((".",), 66, "not a run directory"),
        (("kava", "--control", "missing"), 66, "missing: no such local folder"),
    ],
)
def test_audit_refuses_in_one_line(run_cli: RunCli, args: tuple[str, ...], code: int, message: str) -> None:
    result = run_cli("audit", *args)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert len(result.err.strip().splitlines()) == 1
