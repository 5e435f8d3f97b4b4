"""`--help` of every command has an example and imports neither torch nor other slow packages."""

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
PROGRAM = """import sys
sys.argv = ["laconic", *{command!r}.split(), "--help"]
from laconic.cli.main import main
try:
    main()
except SystemExit:
    sys.exit(", ".join(set({slow!r}) & set(sys.modules)) or 0)"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_imports_no_slow_package(command: str) -> None:
    program = PROGRAM.format(command=command, slow=SLOW_PACKAGES)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"imported: {result.stderr}"
    assert f"Example: laconic {command}".removesuffix(" all").removesuffix(" think") in " ".join(result.stdout.split())


def test_help_ends_on_a_terminal_of_one_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    with pytest.raises(SystemExit) as end:
        parse_command(["version", "--help"])
    assert end.value.code == 0
    assert "laconic" in capsys.readouterr().out
