"""torch.compile: the compiled pass equals the eager one, in at most three graphs and without graph breaks."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import REPO
from tests.tolerances import FLOAT32


def run_compiled(*jobs: str) -> dict[str, Any]:
    """Run jobs in one process without jaxtyping's checks."""
    path = os.pathsep.join([str(REPO / "src"), str(REPO), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [sys.executable, "-m", "tests.models.compiled", *jobs],
        cwd=REPO, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


@pytest.mark.slow
def test_compiled_prefill_and_steps_use_three_graphs() -> None:
    """Other numbers of rows and lengths need no new graph."""
    results = run_compiled("steps,llama")["steps,llama"]
    assert results["graphs"] == [3, 3]
    assert results["worst"] <= FLOAT32


@pytest.mark.slow
def test_compiled_arguments_operations_and_gradients() -> None:
    """A pass that captures nothing has no operations for capturing."""
    results = run_compiled("arguments,mistral", "arguments,gpt2", "operations,llama", "gradients,qwen3")
    for job in ("arguments,mistral", "arguments,gpt2", "gradients,qwen3"):
        assert results[job] <= FLOAT32
    operations = results["operations,llama"]
    assert operations["plain"] == operations["bare"]
    assert len(operations["captured"]) > len(operations["plain"]) > 40
