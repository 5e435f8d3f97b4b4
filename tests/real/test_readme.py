"""The README's commands for a pretrained model."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.house.source import blocks, sandbox
from tests.house.warm import laconic


@pytest.mark.real
def test_readme_commands_on_smollm2(smollm2: Path, tmp_path: Path) -> None:
    inside = sandbox(tmp_path, wants_shared=False)
    commands = next(
        block for _, block in blocks(REPO / "README.md", "sh")
    ).splitlines()  # the next serves until a signal
    copy, *commands = commands
    _, source, target = copy.partition("#")[0].split()
    shutil.copy(REPO / source, inside / target)
    assert [command.split()[:3] for command in commands] == [
        ["laconic", name, "smollm2"] for name in ("compress", "generate")
    ]
    for command in commands:
        done = laconic(command, inside)
        assert done.returncode == 0, done.stderr
    assert "railway" in done.stdout
