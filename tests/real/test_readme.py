"""The README's commands for a pretrained model."""

import json
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.house.source import blocks, sandbox
from tests.house.warm import laconic


@pytest.mark.real
def test_readme_commands_on_smollm2(smollm2: Path, shared: Path, tmp_path: Path) -> None:
    inside = sandbox(tmp_path, wants_shared=False)
    with (shared / "data/text/standard-ebooks.jsonl").open() as file:
        text = next(row["text"] for row in map(json.loads, file) if "Dracula" in row["title"])
    (inside / "book.txt").write_text(text[:3000])
    commands = next(
        block for _, block in blocks(REPO / "README.md", "sh")
    ).splitlines()  # the next serves until a signal
    assert [command.split()[:3] for command in commands] == [
        ["laconic", name, "smollm2"] for name in ("compress", "generate")
    ]
    for command in commands:
        done = laconic(command, inside)
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
