"""Train a method to the end of its run, or repeat an update that was not finite; independent of the method."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from laconic.config.training import TrainingConfig
from laconic.console import log_note
from laconic.errors import InputError
from laconic.interfaces import TrainingData
from laconic.storage.run_dir import RunDirectory
from laconic.training import nonfinite_report
from laconic.training.checkpoint import ModelIO, StateDictIO
from laconic.training.optim import build_adamw
from laconic.training.ranks import Ranks, SingleProcess
from laconic.training.row_order import compute_update_index
from laconic.training.run import ProgressFn, Resume, TrainingResult, TrainingRun, ValidateFn, choose_start
from laconic.training.signals import StopSignal, handle_signals
from laconic.training.step import OptimizerBuilder, get_random_state
from laconic.training.trackers import Tracker


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
    tracker: Tracker | None = None,
    stop: StopSignal | None = None,
) -> TrainingResult:
    """Train until all steps are done or `config.early_stop` is reached.

    A resumed run equals an uninterrupted one bit for bit, on the same build, device type and number of ranks.

    Args:
        method: Module that implements `Method`.
        data: Rows to train on.
        config: Steps, batch sizes, optimizer, checkpoints.
        run: Directory to save steps in; the caller holds its lock.
        seed: Seed of the order of rows and of all random numbers.
        model_io: Saves and loads the model of a step; by default all tensors of the method.
        fingerprints: SHA-256 of recipe and base weights, to which those of the data are added. Steps with other ones
            are not resumed.
        validate: Called with the epoch; returns metrics.
        report_progress: Called after every update with a text, the updates done and their total, those of the steps
            before a resumed one included.
        ranks: Processes that train together; by default this one alone.
        device: Device to train on.
        build_optimizer: Builds the optimizer of the trainable parameters.
        resume: "auto" continues from the latest valid step, "never" refuses a run that has steps, a number names one.
        tracker: Receives a copy of the metrics of a run.
        stop: Signals, if the caller handles them already.

    Raises:
        BusyError: If `resume` is "never" and the run has steps.
        CorruptArtifactError: If no step is valid or one belongs to other data, recipe or base weights.
        DiskError: If a step cannot be written, or there is no room for one.
        InputError: If there are fewer rows than a batch has.
        NonFiniteError: If a number is not finite; a report is written.
        OutOfMemoryError: If memory does not suffice.
        PreemptedError: After a signal; the current step is committed.
    """
    if len(data) < config.batch_size:
        raise InputError(f"{len(data)} rows are fewer than batch_size = {config.batch_size}; lower it or add rows")
    signals = handle_signals() if stop is None else nullcontext(stop)
    with deterministic_kernels(config, torch.device(device)), signals as stop:
        model_io, ranks = model_io or StateDictIO(method), ranks or SingleProcess()
        start = choose_start(run, resume, ranks) if run else None
        training = TrainingRun(
            method, data, config, run, seed, model_io, fingerprints or {}, ranks, device, start, build_optimizer
        )
        training.check_free_space()
        training.open_metrics(tracker)
        if start and report_progress and ranks.rank == 0:
            log_note(f"{start.path.parent.parent.name}: resumed from step {start.step} of {training.num_steps}")
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
    """Repeat the update saved in incidents/step-N, where N is `step`, and return its report.

    The other arguments are those of `train`.
    """
    with deterministic_kernels(config, torch.device(device)):
        model_io, ranks = model_io or StateDictIO(method), ranks or SingleProcess()
        earlier = [number for number in run.step_numbers() if number < step]
        start = run.get_step(earlier[-1]) if earlier else None
        training = TrainingRun(
            method, data, config, None, seed, model_io, fingerprints or {}, ranks, device, start, build_optimizer
        )
        while training.progress.step < step - 1:
            training.advance()
        index = compute_update_index(config, seed, step - 1, len(data))
        random_state = get_random_state()
        result = training.updater.update(data, index)
        return nonfinite_report.build_report(training.updater, data, index, result, random_state)


@contextmanager
def deterministic_kernels(config: TrainingConfig, device: torch.device) -> Iterator[None]:
    """Use deterministic kernels inside this context: always on a CPU, on a GPU if the recipe asks for them.

    On a CPU subnormal numbers are flushed to zero, because sharp attention produces many and they are slow.
    """
    before, options = torch.are_deterministic_algorithms_enabled(), cast(Any, torch.utils.deterministic)
    fill = options.fill_uninitialized_memory
    torch.use_deterministic_algorithms(before or config.deterministic or device.type == "cpu")
    options.fill_uninitialized_memory = False
    torch.set_flush_denormal(device.type == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(before)
        options.fill_uninitialized_memory = fill
