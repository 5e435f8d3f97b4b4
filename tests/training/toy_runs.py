"""Runs of the toy method in a folder, and comparisons of two runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.interfaces import TrainingData
from laconic.storage import manifest
from laconic.storage.run_dir import RunDirectory
from laconic.training.checkpoint import ModelIO
from laconic.training.loop import train
from laconic.training.run import TrainingResult, TrainingSetup
from tests.training.toy import ToyData, ToyMethod

STEPS = 12


def toy_config(**changed: Any) -> TrainingConfig:
    """Twelve updates of eight rows, with every feature that has state."""
    defaults: dict[str, Any] = {
        "steps": STEPS, "batch_size": 8, "micro_batch_size": 3, "learning_rate": 1e-2, "warmup_ratio": 0.2,
        "weight_decay": 0.1, "max_grad_norm": 1.0,
        "save_every": 4,
    }  # fmt: skip
    return TrainingConfig(**(defaults | changed))


def run_training(
    path: Path,
    settings: TrainingConfig | None = None,
    *,
    method: nn.Module | None = None,
    data: TrainingData | None = None,
    model_io: ModelIO | None = None,
    fingerprints: Mapping[str, str] | None = None,
    **named: Any,
) -> tuple[TrainingResult, nn.Module]:
    """Start or resume a run and train to its end, in this process."""
    method = ToyMethod() if method is None else method
    run, data, config = RunDirectory(path), ToyData() if data is None else data, settings or toy_config()
    setup = TrainingSetup(method, data, config, seed=5, model_io=model_io, fingerprints=fingerprints or {})
    with run.lock():
        return train(setup, run=run, **named), method


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run without their timing."""
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in records]


def step_hashes(path: Path, step: int) -> dict[str, str]:
    """The hash of every file of a step, without length and hash of metrics.jsonl, which depend on timing."""
    folder = RunDirectory(path).step_path(step)
    files = {name: file.sha256 for name, file in manifest.verify_folder(folder, "step", step).files.items()}
    progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    return files | {"progress.json": str(sorted((k, v) for k, v in progress.items() if not k.startswith("metrics_")))}


def runs_equal(one: Path, other: Path, step: int = STEPS) -> bool:
    """Whether two runs have the same weights, optimizer, random states and metrics, bit for bit."""
    return step_hashes(one, step) == step_hashes(other, step) and read_metrics(one) == read_metrics(other)


def flat_parameters(method: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in method.parameters()])
