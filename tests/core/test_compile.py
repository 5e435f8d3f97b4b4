"""torch.compile: the compiled pass is the eager one, in at most three graphs and without a break."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import REPO
from tests.tolerances import FLOAT32

JOBS = ("steps,llama", "everything,gpt2", "stages,llama", "gradients,qwen3")


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """All jobs in one process, where no shape check wraps what is compiled."""
    path = os.pathsep.join([str(REPO / "src"), str(REPO), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.core.compiled", *JOBS],
        cwd=REPO, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_prefill_first_and_further_steps_are_three_graphs(compiled: dict[str, Any]) -> None:
    """Other rows and lengths need no new one."""
    found = compiled["steps,llama"]
    assert found["graphs"] == [3, 3]
    assert found["worst"] <= FLOAT32


def test_every_argument_passes_through(compiled: dict[str, Any]) -> None:
    assert compiled["everything,gpt2"] <= FLOAT32


def test_a_pass_that_wants_nothing_has_no_operation_for_stages(compiled: dict[str, Any]) -> None:
    found = compiled["stages,llama"]
    assert found["plain"] == found["bare"]
    assert len(found["looked"]) > len(found["plain"]) > 40


def test_gradients_under_the_compiler(compiled: dict[str, Any]) -> None:
    assert compiled["gradients,qwen3"] <= FLOAT32
