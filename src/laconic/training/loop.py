"""The training loop, which knows no method: `train` a run to its end, `replay` an update that went wrong."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.errors import InputError
from laconic.interfaces import TrainingData
from laconic.storage.run_dir import RunDirectory
from laconic.training import checkpoint, nonfinite_report
from laconic.training.checkpoint import ModelIO, StateDictIO
from laconic.training.optim import build_adamw
from laconic.training.ranks import Ranks, SingleProcess
from laconic.training.run import ProgressFn, Resume, TrainingResult, TrainingRun, ValidateFn, choose_start
from laconic.training.signals import handle_signals
from laconic.training.step import OptimizerBuilder, compute_update_index


def train(
    method: nn.Module,
    data: TrainingData,
    config: TrainingConfig,
    *,
    run: RunDirectory | None = None,
    seed: int = 0,
    model_io: ModelIO | None = None,
    fingerprints: Mapping[str, str] | None = None,
    validate: ValidateFn | None = None,
    report_progress: ProgressFn | None = None,
    ranks: Ranks | None = None,
    device: torch.device | str = "cpu",
    build_optimizer: OptimizerBuilder = build_adamw,
    resume: Resume = "auto",
    tracker_project: str | None = None,
) -> TrainingResult:
    """Trains until the steps are done or `how.stop_when` is reached; with a `run`, which the caller holds, on disk.

    `model` writes and reads the model part of a step; default: all tensors of the method as they are called there.
    `bound` are SHA-256 values of what a step belongs to (recipe, base); the rows' is added. `optimizer` makes that of
    what is trained. `resume`: "auto" goes on from the newest good step, "never" refuses a directory with steps, a
    number is that step. A resumed run equals the one that never stopped, bit for bit, on the same build, device type
    and layout.

    Raises `NonFinite` (65) with an incident, `BadInput` (66), `OutOfMemory` (71), `Busy` (73), `NoSpace` (74),
    `Preempted` (75) after a signal, `Damaged` (76).
    """
    if len(data) < config.batch_size:
        raise InputError(f"train: {len(data)} rows, a batch has {config.batch_size}; take a smaller batch or more rows")
    with deterministic_kernels(config, torch.device(device)), handle_signals() as stop:
        model_io, ranks = model_io or StateDictIO(method), ranks or SingleProcess()
        start = choose_start(run, resume, ranks) if run else None
        training = TrainingRun(
            method, data, config, run, seed, model_io, fingerprints or {}, ranks, device, start, build_optimizer
        )
        training.open_metrics(tracker_project)
        try:
            training.run_to_end(stop, validate, report_progress)
        finally:
            training.close()
        return training.result


def replay(
    method: nn.Module,
    data: TrainingData,
    config: TrainingConfig,
    *,
    run: RunDirectory,
    step: int,
    seed: int = 0,
    model_io: ModelIO | None = None,
    fingerprints: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
    device: torch.device | str = "cpu",
    build_optimizer: OptimizerBuilder = build_adamw,
) -> dict[str, Any]:
    """Goes to the update that gave incidents/step-N, by N = `step`, and repeats it; what it gives is the incident."""
    with deterministic_kernels(config, torch.device(device)):
        model_io, ranks = model_io or StateDictIO(method), ranks or SingleProcess()
        earlier = [number for number in run.step_numbers() if number < step]
        start = run.get_step(earlier[-1]) if earlier else None
        running = TrainingRun(
            method, data, config, None, seed, model_io, fingerprints or {}, ranks, device, start, build_optimizer
        )
        while running.progress.step < step - 1:
            running.advance()
        at = compute_update_index(config, seed, step - 1, len(data))
        before = checkpoint.get_random_state()
        did = running.updater.update(data, at)
        return nonfinite_report.build_report(running.updater, data, at, did, before)


@contextmanager
def deterministic_kernels(config: TrainingConfig, device: torch.device) -> Iterator[None]:
    """Deterministic kernels inside: on a CPU always, on a GPU where the recipe asks for them.

    On a CPU numbers below the normal range count as 0 too: sharp attention is full of them, and each costs a
    hundred others.
    """
    before, memory = torch.are_deterministic_algorithms_enabled(), cast(Any, torch.utils.deterministic)
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(before or config.deterministic or device.type == "cpu")
    memory.fill_uninitialized_memory = False
    torch.set_flush_denormal(device.type == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fill
