"""Runs of the toy method in a folder, and what two of them share."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.storage import manifest
from laconic.storage.run_dir import RunDirectory
from laconic.training.loop import train
from laconic.training.run import TrainingResult
from tests.training.toy import Points, Toy

STEPS = 12


def how(**changed: Any) -> TrainingConfig:
    """Twelve updates of eight rows, with everything on that could be forgotten."""
    plain: dict[str, Any] = {
        "steps": STEPS, "batch": 8, "micro": 3, "lr": 1e-2, "warmup": 0.2, "weight_decay": 0.1, "clip": 1.0,
        "save_every": 4,
    }  # fmt: skip
    return TrainingConfig(**(plain | changed))


def trained(
    path: Path, settings: TrainingConfig | None = None, *, method: nn.Module | None = None, **named: Any
) -> tuple[TrainingResult, nn.Module]:
    """A run from wherever it was to its end, in this process."""
    method = Toy() if method is None else method
    run = RunDirectory(path)
    with run.lock():
        return train(method, named.pop("source", Points()), settings or how(), run=run, seed=5, **named), method


def lines(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run, but for the seconds that a step took."""
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def held(path: Path, step: int) -> dict[str, str]:
    """Every file of a step by its hash; of the progress what does not depend on the seconds in metrics.jsonl."""
    folder = RunDirectory(path).step_path(step)
    files = {name: file.sha256 for name, file in manifest.verify_folder(folder, "step", step).files.items()}
    progress = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    return files | {"progress.json": str(sorted((k, v) for k, v in progress.items() if k != "bytes"))}


def same(one: Path, other: Path, step: int = STEPS) -> bool:
    """Whether two runs came to the same weights, optimizer, random numbers and metrics, bit for bit."""
    return held(one, step) == held(other, step) and lines(one) == lines(other)


def parameters(method: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in method.parameters()])
