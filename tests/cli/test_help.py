"""`--help` of every command has an example and imports neither torch nor other slow packages."""

import json
import subprocess
import sys

import pytest

from laconic.cli.main import parse_command

COMMANDS = [
    "demo think", "demo read", "train", "compress", "generate", "inspect", "data list", "data check",
    "data make", "evaluate", "audit", "export",
    "report", "tasks", "verify parity", "verify all", "chat",
    "recipes list", "recipes show", "recipes keys", "version",
]  # fmt: skip
SLOW_PACKAGES = ["torch", "numpy", "transformers", "datasets", "matplotlib", "scipy", "pydantic"]
PROGRAM = f"""import contextlib, io, json, sys
from laconic.cli.main import main
helps = {{}}
for command in sys.argv[1:]:
    sys.argv, out = ["laconic", *command.split(), "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            main()
    except SystemExit as end:
        helps[command] = end.code, out.getvalue(), sorted(set({SLOW_PACKAGES!r}) & set(sys.modules))
print(json.dumps(helps))"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int, str, list[str]]]:
    """Exit code, help and slow packages of each command, one after the other in a process of their own."""
    command = [sys.executable, "-c", PROGRAM, *COMMANDS]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


@pytest.mark.medium
@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_imports_no_slow_package(
    helps: dict[str, tuple[int, str, list[str]]], command: str
) -> None:
    code, text, imported = helps[command]
    assert (code, imported) == (0, [])
    assert f"Example: laconic {command}".removesuffix(" all").removesuffix(" think") in " ".join(text.split())


def test_help_ends_on_a_terminal_of_one_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    with pytest.raises(SystemExit) as end:
        parse_command(["version", "--help"])
    assert end.value.code == 0
    assert "laconic" in capsys.readouterr().out
