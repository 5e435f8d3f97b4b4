"""Arguments that several verbs take: words and numbers between commas, and the names of runs."""

from pathlib import Path

import pytest

from laconic.cli.arguments import parse_ints, split_commas
from laconic.errors import UsageError
from laconic.evaluation.runs import seed_run_name, short_run_names
from tests.conftest import RunCli, check_refused


def test_words_and_numbers_between_commas() -> None:
    assert split_commas(" a, b,,a ,c") == ("a", "b", "c")
    assert parse_ints("--jacobi-iterations", "0, 3,0") == (0, 3)
    assert parse_ints("--jacobi-iterations", None) == ()
    for text in ("two", "-1", "", "1,x"):
        with pytest.raises(UsageError, match=f"--latents {text}: expected comma-separated integers"):
            parse_ints("--latents", text)


def test_names_of_runs_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_run_names(["runs/a", "runs/b"]) == ["a", "b"]
    assert short_run_names(["a/seed-0"]) == ["a/seed-0"]
    assert short_run_names(["x/a/seed-0", "y/a/seed-0"]) == ["x/a/seed-0", "y/a/seed-0"]
    assert short_run_names(["same", "same"]) == ["same", "same"]
    assert short_run_names(["."]) == [tmp_path.name]
    assert seed_run_name("kava", "runs/kava", Path("runs/kava")) == "kava"
    assert seed_run_name("kava", "runs/kava", Path("runs/kava/seed-1")) == "kava/seed-1"


@pytest.mark.parametrize("flag", ["--task", "--tasks"])
@pytest.mark.parametrize("command", ["audit", "evaluate", "inspect"])
def test_task_flag_has_both_spellings(run_cli: RunCli, command: str, flag: str) -> None:
    check_refused(run_cli(command, "missing", flag, "valid"), 66, "missing")
