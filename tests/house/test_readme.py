"""What the pages show is run: every laconic command, every Python block."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO, needs
from tests.house.guides import CHAPTER, copy_stand_in
from tests.house.source import blocks, commands, sandbox
from tests.house.warm import laconic, python

PAGES = ["README.md", "docs/tour.md"]


def test_readme_names_the_two_commands_on_its_first_screen() -> None:
    first_screen = (REPO / "README.md").read_text(encoding="utf-8").splitlines()[:40]
    for command in ("make demo", "make test"):
        assert any(command in line for line in first_screen), command


def test_readme_has_at_most_150_lines() -> None:
    assert len((REPO / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if "tour" in page else ()) for page in PAGES]
)
def test_commands_of_the_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the packaged story model in place of SmolLM2, which tests/real has."""
    page_commands = commands(REPO / page)
    assert page_commands, f"{page} shows no laconic command in a console block"
    text = " ".join(command for _, command in page_commands)
    inside = sandbox(tmp_path, wants_shared="shared" in text or "LACONIC_DATA" in text)
    copy_stand_in(tmp_path / "models/smollm2-135m-instruct")
    monkeypatch.setenv("LACONIC_MODELS", str(tmp_path / "models"))
    (inside / "book.txt").write_bytes(CHAPTER.read_bytes()[:2400])
    (inside / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n{"prompt": "The dog"}\n')
    failed: list[str] = []
    for line, command in page_commands:
        done = laconic(command, inside)
        if done.returncode:
            failed.append(
                f"{page}:{line}: {command}\nexit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
    assert not failed, "\n\n".join(failed)


@pytest.mark.medium
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if "tour" in page else ()) for page in PAGES]
)
def test_python_of_the_page_runs(page: str, tmp_path: Path) -> None:
    """One program a page; blank lines stand for the prose, so that a traceback names the page's lines."""
    lines = [""] * len((REPO / page).read_text(encoding="utf-8").splitlines())
    for start, text in blocks(REPO / page, "python"):
        code = text.splitlines()
        lines[start - 1 : start - 1 + len(code)] = code
    program = "\n".join(lines)
    assert program.strip(), f"{page} shows no Python"
    inside = sandbox(tmp_path, wants_shared="shared" in program or "LACONIC_DATA" in program)
    script = tmp_path / f"{Path(page).stem}.py"
    script.write_text(program, encoding="utf-8")
    done = python(str(script), inside)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.medium
def test_python_of_the_readme_passes_pyright(tmp_path: Path) -> None:
    """As in the editor of a user, who has laconic installed."""
    needs("pyright")
    for i, (_, text) in enumerate(blocks(REPO / "README.md", "python")):
        (tmp_path / f"program{i}.py").write_text(text, encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(REPO / "src")]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 2
    assert [problem["message"] for problem in report["generalDiagnostics"]] == []


def test_the_text_the_readme_shows_is_the_text_that_comes(tmp_path: Path) -> None:
    example = next(text for _, text in blocks(REPO / "README.md", "console") if "laconic generate" in text)
    command, *output = example.splitlines()
    done = laconic(command[2:], sandbox(tmp_path, wants_shared=True))
    assert done.stdout.splitlines() == output


def test_the_counts_the_readme_gives_are_those_of_the_pages() -> None:
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    mutations = (REPO / "docs/mutations.md").read_text(encoding="utf-8")
    ledger = (REPO / "docs/ledger.md").read_text(encoding="utf-8")
    reliability = (REPO / "docs/reliability.md").read_text(encoding="utf-8")
    caught = re.search(r"(\d+) of (\d+) caught", mutations)
    assert caught is not None
    assert caught[1] == caught[2]
    assert f"{caught[1]} wrong decoders" in readme
    rows = [line.split("|") for line in ledger.splitlines() if line.startswith("| [")]
    assert f"{sum(int(row[3]) for row in rows)} equations that are not implemented" in readme
    assert f"{sum(int(row[4]) for row in rows)} misreadings rejected by the tests" in readme
    kills = re.search(r"\*\*laconic, all\*\* \| ([\d,]+) \| ([\d,]+) \| 0 \|", reliability)
    assert kills is not None
    assert kills[1] == kills[2]
    assert f"no committed work was lost in {kills[1]} kills" in readme
