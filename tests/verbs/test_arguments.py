"""Arguments that several verbs take: words and numbers between commas, and the names of runs."""

from pathlib import Path

import pytest

from laconic.core.errors import Usage
from laconic.verbs.arguments import names, numbers, run_name, words


def test_words_and_numbers_between_commas() -> None:
    assert words(" a, b,,a ,c") == ("a", "b", "c")
    assert numbers("--rounds", "0, 3,0") == (0, 3)
    assert numbers("--rounds", None) == ()
    for text in ("two", "-1", "", "1,x"):
        with pytest.raises(Usage, match=f"--slots {text}: write whole numbers with commas between them, 1,2 say"):
            numbers("--slots", text)


def test_names_of_runs_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert names(["runs/a", "runs/b"]) == ["a", "b"]
    assert names(["a/seed-0"]) == ["a/seed-0"]
    assert names(["x/a/seed-0", "y/a/seed-0"]) == ["x/a/seed-0", "y/a/seed-0"]
    assert names(["same", "same"]) == ["same", "same"]
    assert names(["."]) == [tmp_path.name]
    assert run_name("kava", "runs/kava", Path("runs/kava")) == "kava"
    assert run_name("kava", "runs/kava", Path("runs/kava/seed-1")) == "kava/seed-1"
