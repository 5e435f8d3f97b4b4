"""Methods with a non-finite number in one update, and checks of a run that meets it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

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

BAD_STEP = 5  # counted from 0

# Where the number is, its value, and the place that the report must name.
CASES: dict[str, tuple[float, str]] = {
    "input": (math.nan, "NonFiniteMethod: aten::mul"),
    "loss": (math.inf, "NonFiniteMethod: aten::add"),
    "part": (math.nan, "NonFiniteMethod: aten::mul"),
    "gradient": (math.nan, " in backward"),
    "latent": (math.inf, "NonFiniteMethod.norm: aten::mul"),
    "parameter": (math.nan, "parameter second.weight"),
    "state": (math.inf, "NonFiniteMethod: aten::full"),
    "fast weight": (math.inf, "NonFiniteMethod: aten::full"),
}


class ScaledNorm(nn.LayerNorm):
    """Multiplied twice by a factor that overflows in one update."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor * self.factor


class NonFiniteMethod(ToyMethod):
    """The toy method with one non-finite number in some updates."""

    state_types: ClassVar = {"KVCache": KVCache}

    def __init__(self, case: str, steps: tuple[int, ...] = (BAD_STEP,)) -> None:
        super().__init__()
        self.case, self.bad_steps, self.value = case, steps, CASES[case][0]
        self.norm = ScaledNorm(8)

    def forward(self, batch: ToyBatch, state: Any = None) -> StepOutput:
        now, bad = batch.step in self.bad_steps, self.value
        if now and self.case == "input":
            batch = replace(batch, x=batch.x * bad)
        if now and self.case == "parameter":
            with torch.no_grad():
                self.second.weight[0, 0] = bad
        self.norm.factor = 3e38 if now and self.case == "latent" else 1.0
        step = super().forward(batch)
        if now and self.case == "loss":
            step = step._replace(loss=step.loss + bad)
        if now and self.case == "part":
            square = step.metrics["square"] * bad
            step = step._replace(loss=step.loss + square, metrics={**step.metrics, "square": square})
        if now and self.case == "gradient":
            zero = (self.second.bias - self.second.bias.detach()).sum()
            step = step._replace(loss=step.loss + zero.abs().sqrt())  # 0 by value, its slope is not
        if self.case in ("state", "fast weight"):
            bad_or_one = torch.full((1, 1, 1, 1), self.value if now else 1.0)
            sides = (
                (bad_or_one, torch.ones_like(bad_or_one))
                if self.case == "state"
                else (torch.ones_like(bad_or_one), bad_or_one)
            )
            cache = KVCache((sides[0],), (sides[1],), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1).bool())
            step = step._replace(state=cache)
        return step


def check_run_stops(path: Path, case: str) -> dict[str, Any]:
    """R6: the update is not applied, the run ends with 65, a report is written, nothing bad is on disk."""
    settings = toy_config(stateful=case in ("state", "fast weight"), save_every=100)
    toy = NonFiniteMethod(case)
    with pytest.raises(
        NonFiniteError, match=rf"^step {BAD_STEP + 1}: .* not finite; the update was not applied.*; see "
    ):
        run_training(path / "run", settings, method=toy)
    assert len(read_metrics(path / "run")) == BAD_STEP
    run = RunDirectory(path / "run")
    for number in run.step_numbers():
        manifest.verify_folder(run.step_path(number), "step", number)
    if case != "parameter":
        assert run.step_numbers() == [BAD_STEP], "the state before the update is committed"
        assert bool(flat_parameters(toy).isfinite().all())
    else:
        assert run.step_numbers() == []
    return json.loads(
        (run.path / "incidents" / f"step-{BAD_STEP + 1:06d}" / "incident.json").read_text(encoding="utf-8")
    )
