"""Train a method to the end of its run, or repeat an update that was not finite; independent of the method."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch

from laconic.config.training import TrainingConfig
from laconic.console import ProgressFn, log_note
from laconic.errors import InputError
from laconic.storage.run_dir import RunDirectory
from laconic.training import nonfinite_report
from laconic.training.random_state import get_random_state
from laconic.training.row_order import compute_update_index
from laconic.training.run import Resume, TrainingResult, TrainingRun, TrainingSetup, ValidateFn, choose_start
from laconic.training.signals import StopSignal, handle_signals
from laconic.training.trackers import Tracker


def train(
    setup: TrainingSetup,
    *,
    run: RunDirectory | None = None,
    resume: Resume = "auto",
    validate: ValidateFn | None = None,
    report_progress: ProgressFn | None = None,
    tracker: Tracker | None = None,
    stop: StopSignal | None = None,
) -> TrainingResult:
    """Train until all steps are done or `early_stop` of the config is reached.

    A resumed run equals an uninterrupted one bit for bit, on the same build, device type and number of ranks.

    Args:
        setup: Method, data and settings.
        run: Directory to save steps in; the caller holds its lock.
        resume: "auto" continues from the latest valid step, "never" refuses a run that has steps, a number names one.
        validate: Called with the epoch; returns metrics.
        report_progress: Called after every update with a text, the updates done and their total, those of the steps
            before a resumed one included.
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
    num_rows = len(setup.data)
    batch_size = setup.config.batch_size
    if num_rows < batch_size:
        raise InputError(f"{num_rows} rows are fewer than batch_size = {batch_size}; lower it or add rows")
    signals = handle_signals() if stop is None else nullcontext(stop)
    with deterministic_kernels(setup.config, torch.device(setup.device)), signals as stop:
        start = choose_start(run, resume, setup.ranks) if run else None
        training = TrainingRun(setup, run, start)
        training.check_free_space()
        training.open_metrics(tracker)
        if start and report_progress and setup.ranks.rank == 0:
            is_finished = start.step == training.num_steps
            what = "already finished, at" if is_finished else "resumed from"
            advice = "; a larger train.steps trains on" if is_finished else ""
            log_note(f"{start.path.parent.parent.name}: {what} step {start.step} of {training.num_steps}{advice}")
        try:
            training.run_to_end(stop, validate, report_progress)
        finally:
            training.close()
        return training.result


def replay(setup: TrainingSetup, run: RunDirectory, step: int) -> dict[str, Any]:
    """Repeat the update saved in incidents/step-N of a run, where N is `step`, and return its report."""
    with deterministic_kernels(setup.config, torch.device(setup.device)):
        earlier = [number for number in run.step_numbers() if number < step]
        training = TrainingRun(setup, start=run.get_step(earlier[-1]) if earlier else None)
        while training.progress.step < step - 1:
            training.advance()
        index = compute_update_index(setup.config, setup.seed, step - 1, len(setup.data))
        random_state = get_random_state()
        result = training.updater.update(setup.data, index, random_state)
        return nonfinite_report.build_report(training.updater, setup.data, index, result, random_state)


@contextmanager
def deterministic_kernels(config: TrainingConfig, device: torch.device) -> Iterator[None]:
    """Use deterministic kernels inside this context: always on a CPU, on a GPU if the recipe asks for them.

    On a CPU subnormal numbers are flushed to zero, because sharp attention produces many and they are slow.
    """
    options = cast(Any, torch.utils.deterministic)
    mode_before = torch.get_deterministic_debug_mode()
    fill_before = options.fill_uninitialized_memory
    if device.type == "cpu":
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import Inductor, for a second
    else:
        torch.use_deterministic_algorithms(config.deterministic or mode_before > 0)
    options.fill_uninitialized_memory = False
    torch.set_flush_denormal(device.type == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        if device.type == "cpu":
            torch.set_deterministic_debug_mode(mode_before)
        else:
            torch.use_deterministic_algorithms(mode_before > 0, warn_only=mode_before == 1)
        options.fill_uninitialized_memory = fill_before
