"""TrainingConfig: invalid values, number of updates, no import of torch."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from laconic.config.training import TrainingConfig


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "exactly one"),
        ({"steps": 3, "epochs": 2}, "exactly one"),
        ({"steps": 3, "warmup_ratio": 0.1, "warmup_steps": 4}, "only one"),
        ({"steps": 3, "batch_size": 4, "micro_batch_size": 5}, "exceeds batch_size 4"),
        ({"steps": 3, "reshard": True}, "nothing is sharded"),
        ({"steps": 0}, "greater than or equal to 1"),
        ({"steps": 3, "learning_rate": float("inf")}, "finite number"),
        ({"steps": 3, "learning_rate": "1e-3"}, "valid number"),
        ({"steps": 3, "betas": (0.9, 1.0)}, "less than 1"),
        ({"steps": 3, "momentum": 0.9}, "Extra inputs are not permitted"),
    ],
)
def test_training_config_refuses(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainingConfig(**changed)
    assert message in str(caught.value)


def test_training_config_counts_updates() -> None:
    assert [TrainingConfig(steps=7).total_updates(n) for n in (128, 1000)] == [7, 7]
    assert TrainingConfig(epochs=2, batch_size=8).total_updates(30) == 2 * 3
    assert TrainingConfig(epochs=2, batch_size=8, last_batch="keep").total_updates(30) == 2 * 4
    assert TrainingConfig(epochs=0.5, batch_size=8).total_updates(40) == 3
    assert TrainingConfig(steps=100, warmup_ratio=0.03).num_warmup_updates(100) == 3
    assert TrainingConfig(steps=100, warmup_ratio=0.031).num_warmup_updates(100) == 4
    assert TrainingConfig(steps=100, warmup_steps=50).num_warmup_updates(100) == 50


def test_training_config_does_not_import_torch() -> None:
    command = "import laconic.config.training, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
