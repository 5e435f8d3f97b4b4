"""A training run: updates, metrics, checkpoints, validation, early stopping, and the stop that a signal requests."""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from laconic import rng
from laconic.config.training import TrainingConfig
from laconic.console import ProgressFn
from laconic.errors import BusyError, CorruptArtifactError, NonFiniteError, PreemptedError
from laconic.interfaces import CarriesState, TrainingData
from laconic.models.decoder import Decoder
from laconic.storage import manifest
from laconic.storage.atomic import check_free_space
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory, StepFolder
from laconic.training import checkpoint, nonfinite_report
from laconic.training.checkpoint import ModelIO, Progress, StateDictIO
from laconic.training.metrics import MetricsWriter
from laconic.training.optim import build_adamw
from laconic.training.random_state import get_random_state, set_random_state
from laconic.training.ranks import Ranks
from laconic.training.row_order import compute_update_index
from laconic.training.signals import SignalInterruptError, StopSignal
from laconic.training.step import OptimizerBuilder, Updater, UpdateResult
from laconic.training.trackers import Tracker
from laconic.training.validation_log import VALIDATIONS_FILE, ValidationLog, get_metric, read_validations

VALIDATION_FINGERPRINT = "held_out"  # of what a validation measures; a run may be resumed with another
CHANGED_INPUTS = {"data": "training rows", "recipe": "recipe keys", "base": "weights of the base model",
                  "tokenizer": "ids of the tokenizer"}  # fmt: skip
MAX_SKIPS, SKIP_WINDOW = 3, 100  # non-finite updates that may be skipped within so many steps
MAX_PROGRESS_METRICS = 8  # on the progress line, all losses of KaVa; metrics.jsonl has the gradient norm too
ValidateFn = Callable[[int], Mapping[str, float]]  # from the epoch of the last update to metrics
Resume = Literal["auto", "never"] | int


@dataclass(frozen=True)
class TrainingSetup:
    """Everything that decides which updates a run makes.

    Attributes:
        method: Module that implements `Method`.
        data: Rows to train on.
        config: Steps, batch sizes, optimizer, checkpoints.
        seed: Seed of the order of rows and of all random numbers.
        model_io: Saves and loads the model of a step; by default all tensors of the method.
        fingerprints: SHA-256 of recipe and base weights, to which those of the data are added. Steps with other ones
            are not resumed.
        ranks: Processes that train together; by default this one alone.
        device: Device to train on.
        build_optimizer: Builds the optimizer of the trainable parameters.
    """

    method: nn.Module
    data: TrainingData
    config: TrainingConfig
    seed: int = 0
    model_io: ModelIO | None = None
    fingerprints: Mapping[str, str] = field(default_factory=dict[str, str])
    ranks: Ranks = field(default_factory=Ranks)
    device: torch.device | str = "cpu"
    build_optimizer: OptimizerBuilder = build_adamw


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run: updates tried, finite metrics of the last one, its validation, and best (metric, step)."""

    steps: int
    metrics: Mapping[str, float]
    validation: Mapping[str, float]
    best: tuple[float, int] | None
    num_skipped: int  # updates that were not finite
    step_path: Path | None


class TrainingRun:
    """A run in progress, which resumes from the step `start`."""

    def __init__(
        self, setup: TrainingSetup, run_directory: RunDirectory | None = None, start: StepFolder | None = None
    ) -> None:
        method, config, ranks = setup.method, setup.config, setup.ranks
        self.method, self.data, self.config, self.ranks = method, setup.data, config, ranks
        self.run_directory = run_directory
        self.seed = setup.seed
        self.device = torch.device(setup.device)
        self.model_io = setup.model_io or StateDictIO(method)
        self.fingerprints = {"data": setup.data.fingerprint, **setup.fingerprints}
        self.num_steps = config.total_updates(len(setup.data))
        for module in method.modules():
            if isinstance(module, Decoder):
                module.activation_checkpointing = config.activation_checkpointing
        if start:
            self.check_fingerprints(start)
        if run_directory:  # without a start too: an error now, not at the first step, if the run is not locked
            ranks.run_on_rank_zero(lambda: run_directory.discard_after(start.step if start else 0))
        if start:
            checkpoint.load_model(start.path, self.model_io, method)
        method.to(self.device).train()
        torch.manual_seed(self.seed if ranks.rank == 0 else int(rng.hash64(self.seed, ranks.rank)) >> 1)
        self.updater = Updater(method, config, self.num_steps, ranks, self.device, setup.build_optimizer)
        self.progress = Progress(micro_batch_size=self.updater.micro_batch_size)
        self.metrics_writer: MetricsWriter | None = None
        self.last_metrics: Mapping[str, float] = {}
        if start:
            self.restore(start)
        self.validations = self.load_validations()

    def open_metrics(self, tracker: Tracker | None = None) -> None:
        """Open metrics.jsonl, without the lines after the step resumed from."""
        if self.run_directory is not None and self.ranks.rank == 0:
            path = self.run_directory.path / "metrics.jsonl"
            progress = self.progress
            self.metrics_writer = MetricsWriter(path, progress.metrics_bytes, progress.metrics_sha256, tracker)
            if self.progress.step in self.validations.metrics:  # its line follows the step, which was saved before
                self.write_validation()

    def check_fingerprints(self, start: StepFolder) -> None:
        """Raise `CorruptArtifactError` for a step of other data, base weights or recipe."""
        for name, ours in self.fingerprints.items():
            if name != VALIDATION_FINGERPRINT and not start.has_fingerprint(name, ours):
                theirs = start.manifest.fingerprints.get(name)
                raise CorruptArtifactError(
                    f"{start.path} was trained with other {CHANGED_INPUTS.get(name, name)} ({theirs}, not {ours}); "
                    "restore the old ones, or train from the beginning in another directory"
                )

    def restore(self, start: StepFolder) -> None:
        updater = self.updater
        state_types = self.method.state_types if isinstance(self.method, CarriesState) else {}
        self.progress, states = checkpoint.load_training_state(
            start.path, updater.optimizer, updater.scaler, state_types, self.ranks
        )
        updater.states = [state.to(self.device) for state in states]
        updater.micro_batch_size = self.progress.micro_batch_size
        updater.reset_pending = self.progress.reset_pending

    def run_to_end(self, stop: StopSignal, validate: ValidateFn | None, report_progress: ProgressFn | None) -> None:
        """Run updates, validations and checkpoints until the end, or until a signal requests a stop."""
        first = self.progress.step
        while True:
            is_done = self.progress.step >= self.num_steps
            should_validate = self.should_validate(validate)
            is_due = self.progress.step % self.config.save_every == 0 and self.progress.step > first
            if is_done or is_due or should_validate:
                self.save()  # before the validation, in which the process may die
            if validate and should_validate:
                self.run_validation(stop, validate)
            if is_done or self.has_reached_goal():
                self.prune()
                return
            if self.ranks.any_rank(bool(stop.signal)):
                self.stop_and_commit(stop)
            start = time.monotonic()
            result = self.advance()
            self.write_metrics(result, time.monotonic() - start)
            if report_progress and self.ranks.rank == 0:
                speed = result.num_tokens / max(1e-9, time.monotonic() - start)
                rate = self.updater.optimizer.param_groups[0]["lr"]
                terms = " · ".join(format_metrics(result.metrics))
                text = f"{terms} · learning rate {rate:.2g} · {speed:,.0f} tokens/s; updates"
                report_progress(text, self.progress.step, self.num_steps)

    def advance(self) -> UpdateResult:
        """Run one update and record the progress; NonFiniteError if it is not finite and may not be skipped."""
        index = compute_update_index(self.config, self.seed, self.progress.step, len(self.data))
        random_state = get_random_state()
        result = self.updater.update(self.data, index, random_state)
        if result.status == "nonfinite":
            self.handle_nonfinite(result, random_state)
        self.last_metrics = result.metrics
        progress = self.progress
        progress.step += 1
        progress.epoch, batches = divmod(progress.step, self.config.updates_per_epoch(len(self.data)))
        progress.row_offset = batches * self.config.batch_size
        progress.micro_batch_size = self.updater.micro_batch_size
        progress.reset_pending = self.updater.reset_pending
        return result

    def handle_nonfinite(self, result: UpdateResult, random_state: checkpoint.Tensors) -> None:
        """Skip an update that was not finite if the recipe allows it, else save, write a report and raise."""
        progress = self.progress
        recent = [n for n in progress.skipped_steps if n > progress.step - SKIP_WINDOW]
        if self.config.on_nonfinite == "skip" and len(recent) < MAX_SKIPS:
            progress.skipped_steps = [*progress.skipped_steps, progress.step]
            return
        set_random_state(random_state)
        with suppress(NonFiniteError):  # the parameters themselves may be bad; then the step before is the last
            self.save()
        index = compute_update_index(self.config, self.seed, progress.step, len(self.data))
        report = nonfinite_report.build_report(self.updater, self.data, index, result, random_state)
        place = nonfinite_report.write_report(report, random_state, self.run_directory, self.ranks.rank)
        names = ", ".join(name for name, value in result.metrics.items() if not math.isfinite(value))
        raise NonFiniteError(f"step {progress.step + 1}: {names} not finite; the update was not applied{place}")

    @property
    def epoch(self) -> int:
        """Epoch of the last update."""
        return (self.progress.step - 1) // self.config.updates_per_epoch(len(self.data))

    def should_validate(self, validate: ValidateFn | None) -> bool:
        """Return whether this step is due for validation and has none yet."""
        step, every = self.progress.step, self.config.validate_every
        is_due = step >= self.num_steps or (every is not None and step > 0 and step % every == 0)
        return validate is not None and is_due and step not in self.validations.metrics

    def run_validation(self, stop: StopSignal, validate: ValidateFn) -> None:
        """Validate, leaving no trace but the metrics; UsageError without that of `best_metric` or `early_stop`."""
        random_state = get_random_state()
        metrics: dict[str, float] = {}
        context = stop.interruptible() if self.ranks.world_size == 1 else nullcontext()
        try:
            with context, self.ranks.gather_parameters(self.method):
                self.method.eval()
                metrics = {name: float(value) for name, value in validate(self.epoch).items()}
            metrics = self.ranks.all_gather(metrics)[0]
        except SignalInterruptError:
            stop.was_interrupted = True
        finally:
            self.method.train()
            set_random_state(random_state)
        if stop.was_interrupted:  # the committed step has no validation
            self.stop_and_commit(stop)
        config = self.config
        for name in (config.best_metric, config.early_stop.metric if config.early_stop else None):
            if name is not None:
                get_metric(metrics, name)
        self.validations.metrics[self.progress.step] = metrics
        if self.ranks.rank == 0:
            self.validations.write()
        self.write_validation()

    def write_validation(self) -> None:
        if self.metrics_writer:
            step = self.progress.step
            self.metrics_writer.write({"step": step, "validation": self.validations.metrics[step]})

    def has_reached_goal(self) -> bool:
        """Return whether this step's validation ends the run early."""
        goal = self.config.early_stop
        metrics = self.validations.metrics.get(self.progress.step)
        return goal is not None and metrics is not None and get_metric(metrics, goal.metric) >= goal.at_least

    def load_validations(self) -> ValidationLog:
        """Return the validations of the steps so far, without those that measured something else."""
        run = self.run_directory
        if run is None:
            return ValidationLog()
        fingerprint = self.fingerprints.get(VALIDATION_FINGERPRINT, "")
        log = ValidationLog(run.path / VALIDATIONS_FILE, fingerprint)
        try:
            stored = self.ranks.run_on_rank_zero(lambda: read_validations(run.path))
        except CorruptArtifactError as error:
            warnings.warn(str(error))
            return log
        if stored.fingerprint == fingerprint:
            log.metrics = {step: x for step, x in stored.metrics.items() if step <= self.progress.step}
        elif stored.metrics:
            warnings.warn("the validation measures something else than before; earlier results are dropped")
        return log

    def write_metrics(self, result: UpdateResult, seconds: float) -> None:
        """Write a line of metrics; an update that was not applied is always logged, with its status."""
        if self.metrics_writer and (result.status != "applied" or self.progress.step % self.config.log_every == 0):
            learning_rate = self.updater.optimizer.param_groups[0]["lr"]
            progress = {"step": self.progress.step, "epoch": self.epoch, "lr": learning_rate}
            status = {} if result.status == "applied" else {result.status: 1}
            timing = {"tokens": result.num_tokens, "seconds": round(seconds, 4)}
            self.metrics_writer.write({**progress, **result.metrics, **status, **timing})

    def save(self) -> None:
        """Commit the current step, unless it exists, and delete steps that need not be kept."""
        run, step = self.run_directory, self.progress.step
        if run is None or run.step_path(step).exists():
            return
        if self.metrics_writer:
            self.progress.metrics_bytes = self.metrics_writer.flush_to_disk()
            self.progress.metrics_sha256 = self.metrics_writer.sha256
        self.ranks.commit_step(run, step, self.write_step, self.fingerprints, self.step_bytes)
        self.prune()

    @property
    def step_bytes(self) -> int:
        """Size of a step: the trainable parameters with two moments, and the others where the whole model is saved."""
        parameters = list(self.method.parameters())
        trained = sum(p.nbytes for p in parameters if p.requires_grad)
        return 2 * trained + (sum(p.nbytes for p in parameters) if self.config.trainable == "full" else trained)

    def check_free_space(self) -> None:
        """Raise `DiskError`, before the first update, if the disk has no room for a step."""
        run = self.run_directory
        if run is not None and self.progress.step < self.num_steps:
            self.ranks.run_on_rank_zero(lambda: check_free_space(run.steps_folder, self.step_bytes))

    def prune(self) -> None:
        if self.run_directory is None or self.ranks.rank > 0:
            return
        every = self.config.keep_every
        best = {step for _, step in self.validations.list_best(self.config)}
        multiples = {n for n in self.run_directory.step_numbers() if every and n % every == 0}
        self.run_directory.prune_steps(best | multiples)

    def write_step(self, writer: ManifestWriter) -> None:
        updater = self.updater
        checkpoint.save_model(writer, self.model_io, self.method, self.ranks)
        checkpoint.save_training_state(
            writer, updater.optimizer, updater.scaler, updater.states, self.progress, self.ranks
        )

    def stop_and_commit(self, stop: StopSignal) -> None:
        """Commit the current step and raise `PreemptedError`."""
        self.save()
        reason = stop.signal_name if stop.signal else "a signal to another rank"
        text = f"{reason}: stopped after step {self.progress.step} of {self.num_steps}"
        if self.run_directory:
            text += f", committed in {self.run_directory.path}; run the same command again to resume"
        raise PreemptedError(text)

    def close(self) -> None:
        if self.metrics_writer:
            self.metrics_writer.close()

    @property
    def result(self) -> TrainingResult:
        progress = self.progress
        best = next(iter(self.validations.list_best(self.config)), None)
        validation = self.validations.metrics.get(progress.step, {})
        path = self.run_directory.step_path(progress.step) if self.run_directory else None
        metrics = {name: value for name, value in self.last_metrics.items() if math.isfinite(value)}
        return TrainingResult(progress.step, metrics, validation, best, len(progress.skipped_steps), path)


def choose_start(run: RunDirectory, resume: Resume, ranks: Ranks) -> StepFolder | None:
    """Return the step to resume from, which rank 0 chooses and verifies; BusyError for `resume` "never" and steps."""

    def find() -> int | None:
        if resume == "never":
            if run.step_numbers():
                raise BusyError(f"{run.path} already has checkpoints; resume or choose another folder")
            return None
        chosen = run.latest_valid_step() if resume == "auto" else run.get_step(resume)
        return None if chosen is None else chosen.step

    step = ranks.run_on_rank_zero(find)
    if step is None:
        return None
    return StepFolder(step, run.step_path(step), manifest.read_manifest(run.step_path(step)))


def format_metrics(metrics: Mapping[str, float], most: int | None = MAX_PROGRESS_METRICS) -> list[str]:
    """Return the name and value of the first metrics, loss first."""
    formats = {name: ",.0f" if value % 1 == 0 and abs(value) < 1e12 else ".4g" for name, value in metrics.items()}
    return [f"{name} {metrics[name]:{form}}" for name, form in list(formats.items())[:most]]
