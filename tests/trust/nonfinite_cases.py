"""Methods that give a number which is not finite at one update, and what is asked of a run that meets it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import NonFiniteError
from laconic.interfaces import StepOutput
from laconic.models.cache import KVCache
from laconic.storage import manifest
from laconic.storage.run_dir import RunDirectory
from tests.training.toy import ToyBatch, ToyMethod
from tests.training.toy_runs import flat_parameters, read_metrics, run_training, toy_config

AT = 5  # the update that is spoilt, counted from 0

# What is spoilt, and with what; where the replay must find it.
CASES: dict[str, tuple[float, str]] = {
    "input": (math.nan, "Spoilt: aten::mul"),
    "loss": (math.inf, "Spoilt: aten::add"),
    "part": (math.nan, "Spoilt: aten::mul"),
    "gradient": (math.nan, " in backward"),
    "latent": (math.inf, "Spoilt.norm: aten::mul"),
    "parameter": (math.nan, "parameter second.weight"),
    "state": (math.inf, "Spoilt: aten::full"),
    "fast weight": (math.inf, "Spoilt: aten::full"),
}


class Norm(nn.LayerNorm):
    """Multiplied twice by a number that is 1 until the latent is spoilt."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor * self.factor


class Spoilt(ToyMethod):
    """The toy, with one number spoilt at one update."""

    def __init__(self, what: str, at: tuple[int, ...] = (AT,)) -> None:
        super().__init__()
        self.what, self.at, self.value = what, at, CASES[what][0]
        self.norm = Norm(8)

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        now, bad = batch.step in self.at, self.value
        if now and self.what == "input":
            batch = replace(batch, x=batch.x * bad)
        if now and self.what == "parameter":
            with torch.no_grad():
                self.second.weight[0, 0] = bad
        self.norm.factor = 3e38 if now and self.what == "latent" else 1.0
        step = super().forward(batch)
        if now and self.what == "loss":
            step = step._replace(loss=step.loss + bad)
        if now and self.what == "part":
            step = step._replace(metrics={**step.metrics, "square": step.metrics["square"] * bad})
        if now and self.what == "gradient":
            zero = (self.second.bias - self.second.bias.detach()).sum()
            step = step._replace(loss=step.loss + zero.abs().sqrt())  # 0 by value, its slope is not
        if self.what in ("state", "fast weight"):
            held = torch.full((1, 1, 1, 1), self.value if now else 1.0)
            sides = (held, torch.ones_like(held)) if self.what == "state" else (torch.ones_like(held), held)
            cache = KVCache((sides[0],), (sides[1],), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1).bool())
            step = step._replace(state=cache)
        return step


def stops(path: Path, what: str) -> dict[str, Any]:
    """R6: the update is not applied, the run ends with 65, an incident tells of it, nothing bad is on the disk."""
    settings = toy_config(stateful=what in ("state", "fast weight"), save_every=100)
    toy = Spoilt(what)
    with pytest.raises(NonFiniteError, match=rf"^step {AT + 1}: .* not finite; the update was not applied.*; see "):
        run_training(path / "run", settings, method=toy)
    assert len(read_metrics(path / "run")) == AT
    run = RunDirectory(path / "run")
    for number in run.step_numbers():
        manifest.verify_folder(run.step_path(number), "step", number)
    if what != "parameter":
        assert run.step_numbers() == [AT], "what was before the update is committed"
        assert bool(flat_parameters(toy).isfinite().all())
    else:
        assert run.step_numbers() == []
    return json.loads((run.path / "incidents" / f"step-{AT + 1:06d}" / "incident.json").read_text(encoding="utf-8"))
