"""torch.compile: the compiled pass is the eager one, in at most three graphs and without a break."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import REPO
from tests.tolerances import FLOAT32


def compiled(*jobs: str) -> dict[str, Any]:
    """Jobs in one process, where no shape check wraps what is compiled."""
    path = os.pathsep.join([str(REPO / "src"), str(REPO), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.compiled", *jobs],
        cwd=REPO, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_prefill_first_and_further_steps_are_three_graphs() -> None:
    """Other rows and lengths need no new one."""
    found = compiled("steps,llama")["steps,llama"]
    assert found["graphs"] == [3, 3]
    assert found["worst"] <= FLOAT32


@pytest.mark.slow
def test_arguments_stages_and_gradients() -> None:
    """Every argument passes through; a pass that wants nothing has no operation for stages."""
    found = compiled("everything,mistral", "everything,gpt2", "stages,llama", "gradients,qwen3")
    for job in ("everything,mistral", "everything,gpt2", "gradients,qwen3"):
        assert found[job] <= FLOAT32
    stages = found["stages,llama"]
    assert stages["plain"] == stages["bare"]
    assert len(stages["looked"]) > len(stages["plain"]) > 40
