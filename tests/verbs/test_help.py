"""Help is quick and needs no torch."""

import resource
import subprocess
import sys

import pytest

VERBS = [
    "demo",
    "train",
    "generate",
    "inspect",
    "data list",
    "data check",
    "data make",
    "evaluate",
    "export",
    "verify parity",
    "verify ledger",
    "verify all",
]
LIMIT = 0.35  # CPU seconds
PROGRAM = """import sys
sys.argv = ["laconic", *{verb!r}.split(), "--help"]
from laconic import cli
try:
    cli.main()
except SystemExit:
    sys.exit(1 if "torch" in sys.modules else 0)"""


def seconds(verb: str) -> float:
    """CPU seconds of one help."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(verb=verb)], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, "torch was imported"
    assert "Example: laconic" in done.stdout
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_quick(verb: str) -> None:
    assert any(seconds(verb) <= LIMIT for _ in range(8))  # a machine under load counts more
