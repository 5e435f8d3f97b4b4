"""A run under way: updates, metrics, checkpoints, validation, and the end that a signal asks for."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from laconic import rng
from laconic.config.training import TrainingConfig
from laconic.errors import BusyError, CorruptArtifactError, NonFiniteError, PreemptedError, UsageError
from laconic.interfaces import TrainingData
from laconic.models.decoder import Decoder
from laconic.storage import manifest
from laconic.storage.manifest import ManifestWriter
from laconic.storage.run_dir import RunDirectory, StepFolder
from laconic.training import checkpoint, nonfinite_report
from laconic.training.checkpoint import ModelIO, Progress
from laconic.training.metrics import MetricsWriter
from laconic.training.optim import build_adamw
from laconic.training.ranks import Ranks
from laconic.training.signals import SignalInterruptError, StopSignal
from laconic.training.step import OptimizerBuilder, Updater, UpdateResult, compute_update_index

MAX_SKIPS, SKIP_WINDOW = 3, 100  # updates that may be left out, in how many
MAX_PROGRESS_METRICS = 6  # numbers of an update on the line of progress; all are in metrics.jsonl
MAX_ERROR_METRICS = 4  # numbers that an error names
ProgressFn = Callable[[str, int, int], None]
ValidateFn = Callable[[int], Mapping[str, float]]  # of the epoch of the last update
Resume = Literal["auto", "never"] | int


@dataclass(frozen=True)
class TrainingResult:
    """What a run came to: updates tried, the last loss and parts, the last validation, the best (metric, step)."""

    steps: int
    metrics: Mapping[str, float]
    validation: Mapping[str, float]
    best: tuple[float, int] | None
    num_skipped: int
    step_path: Path | None


class TrainingRun:
    """A run under way: what is updated, how far it is, and its directory."""

    def __init__(
        self,
        method: nn.Module,
        data: TrainingData,
        config: TrainingConfig,
        run_directory: RunDirectory | None,
        seed: int,
        model_io: ModelIO,
        fingerprints: Mapping[str, str],
        ranks: Ranks,
        device: torch.device | str,
        start: StepFolder | None = None,
        build_optimizer: OptimizerBuilder = build_adamw,
    ) -> None:
        self.method, self.data, self.config, self.run_directory, self.seed, self.model_io = (
            method,
            data,
            config,
            run_directory,
            seed,
            model_io,
        )
        self.fingerprints = {"data": data.fingerprint, **fingerprints}
        self.ranks, self.device = ranks, torch.device(device)
        self.num_steps = config.total_updates(len(data))
        for module in method.modules():
            if isinstance(module, Decoder):
                module.activation_checkpointing = config.activation_checkpointing
        if start:
            self.check_fingerprints(start)
            checkpoint.load_model(start.path, model_io, method)
        method.to(self.device).train()
        torch.manual_seed(seed if ranks.rank == 0 else int(rng.hash64(seed, ranks.rank)) >> 1)
        self.updater = Updater(method, config, self.num_steps, ranks, self.device, build_optimizer)
        self.progress = Progress(micro_batch_size=self.updater.micro_batch_size)
        self.metrics_writer: MetricsWriter | None = None
        self.goal_reached = False
        self.last_metrics: Mapping[str, float] = {}
        self.last_validation: Mapping[str, float] = {}
        if start:
            self.restore(start)

    def open_metrics(self, tracker_project: str | None = None) -> None:
        """Opens the metrics behind the step that was resumed from."""
        if self.run_directory is not None and self.ranks.rank == 0:
            self.metrics_writer = MetricsWriter(
                self.run_directory.path / "metrics.jsonl", self.progress.metrics_bytes, tracker_project
            )

    def check_fingerprints(self, start: StepFolder) -> None:
        """Raises `Damaged` (76) for a step of other rows, another base or recipe."""
        for name, ours in self.fingerprints.items():
            theirs = start.manifest.fingerprints.get(name)
            if theirs != ours:
                raise CorruptArtifactError(
                    f"{start.path} was made with {name} {theirs}, this run has {ours}; take those again"
                )

    def restore(self, start: StepFolder) -> None:
        """Optimizer, random numbers, states and progress of a step, whose parameters are in the method."""
        updating = self.updater
        self.progress, updating.states = checkpoint.load_training_state(
            start.path, updating.optimizer, updating.scaler, self.ranks.rank
        )
        updating.states = [state.to(self.device) for state in updating.states]
        updating.micro_batch_size, updating.reset_pending = self.progress.micro_batch_size, self.progress.reset_pending

    def run_to_end(self, stop: StopSignal, validate: ValidateFn | None, report_progress: ProgressFn | None) -> None:
        """Updates until the end, with validation, checkpoints and the end that a signal asks for in between."""
        first = self.progress.step
        while True:
            saved = self.run_validation(stop, validate) if self.should_validate(validate) else False
            over = self.goal_reached or self.progress.step >= self.num_steps
            if over or saved or (self.progress.step % self.config.save_every == 0 and self.progress.step > first):
                self.save()
            if over:
                return
            if self.ranks.any_rank(bool(stop.signal)):
                self.stop_and_commit(stop)
            started = time.monotonic()
            did = self.advance()
            self.write_metrics(did, time.monotonic() - started)
            if report_progress and self.ranks.rank == 0:
                speed = did.num_tokens / max(1e-9, time.monotonic() - started)
                parts = " · ".join(
                    f"{name} {value:.4g}" for name, value in [*did.metrics.items()][:MAX_PROGRESS_METRICS]
                )
                report_progress(f"{parts} · {speed:,.0f} tokens/s", self.progress.step - first, self.num_steps - first)

    def advance(self) -> UpdateResult:
        """One update and what it means for the progress. Raises `NonFinite` where the policy says so."""
        at = compute_update_index(self.config, self.seed, self.progress.step, len(self.data))
        before = checkpoint.get_random_state()
        did = self.updater.update(self.data, at)
        if did.status == "nonfinite":
            self.handle_nonfinite(did, before)
        self.last_metrics = did.metrics
        progress = self.progress
        progress.step += 1
        progress.epoch, progress.row_offset = divmod(progress.step, self.config.updates_per_epoch(len(self.data)))
        progress.row_offset *= self.config.batch_size
        progress.num_overflows += did.status == "overflow"
        progress.micro_batch_size, progress.reset_pending = self.updater.micro_batch_size, self.updater.reset_pending
        return did

    def handle_nonfinite(self, result: UpdateResult, random_state: checkpoint.Tensors) -> None:
        """An update with a number that is not finite: left out, or the end of the run with an incident."""
        step, progress = self.progress.step, self.progress
        recent = [n for n in progress.skipped_steps if n > step - SKIP_WINDOW]
        if self.config.on_nonfinite == "skip" and len(recent) < MAX_SKIPS:
            progress.skipped_steps = [*recent, step]
            return
        checkpoint.set_random_state(random_state)
        with suppress(NonFiniteError):  # what led here may be in the weights; then the last good step stays the newest
            self.save()
        at = compute_update_index(self.config, self.seed, step, len(self.data))
        bad = [name for name, value in result.metrics.items() if not math.isfinite(value)]
        more = f" and {len(bad) - MAX_ERROR_METRICS} more" if len(bad) > MAX_ERROR_METRICS else ""
        where = nonfinite_report.write_report(self.updater, self.data, at, result, random_state, self.run_directory)
        names = ", ".join(bad[:MAX_ERROR_METRICS])
        raise NonFiniteError(f"step {step + 1}: {names}{more} not finite; the update was not applied{where}")

    @property
    def epoch(self) -> int:
        """That of the last update."""
        return (self.progress.step - 1) // self.config.updates_per_epoch(len(self.data))

    def should_validate(self, validate: ValidateFn | None) -> bool:
        """Whether this step is to be validated and was not: every so many, and the last."""
        step, every = self.progress.step, self.config.validate_every
        now = step >= self.num_steps or (every is not None and step > 0 and step % every == 0)
        return validate is not None and now and self.progress.validated_step != step

    def run_validation(self, stop: StopSignal, validate: ValidateFn | None) -> bool:
        """Validates, which leaves no trace but its numbers; says whether the step is among the best."""
        assert validate is not None
        before, found = checkpoint.get_random_state(), dict[str, float]()
        try:
            with (
                stop.interruptible() if self.ranks.world_size == 1 else nullcontext(),
                self.ranks.gather_parameters(self.method),
            ):
                self.method.eval()
                found = {name: float(value) for name, value in validate(self.epoch).items()}
            found = self.ranks.all_gather(found)[0]
        except SignalInterruptError:
            stop.was_interrupted = True
        finally:
            self.method.train()
            checkpoint.set_random_state(before)
        if stop.was_interrupted:  # committed as it was before
            self.stop_and_commit(stop)
        self.last_validation = found
        step, how = self.progress.step, self.config
        self.progress.validated_step = step
        if self.metrics_writer:
            self.metrics_writer.write({"step": step, "validation": found})
        goal = how.early_stop
        self.goal_reached = goal is not None and get_metric(found, goal.metric) >= goal.at_least
        return how.best_metric is not None and self.update_best(get_metric(found, how.best_metric), step)

    def update_best(self, value: float, step: int) -> bool:
        """Puts a validated step into the list of the best; whether it has a place there."""
        if not math.isfinite(value):
            return False
        sign = -1 if self.config.best_mode == "max" else 1
        best = sorted([*self.progress.best, (value, step)], key=lambda item: (sign * item[0], item[1]))
        self.progress.best = best[: self.config.keep_best]
        return (value, step) in self.progress.best

    def write_metrics(self, result: UpdateResult, seconds: float) -> None:
        """A line of metrics; what was not applied is logged always, with nulls and its kind."""
        if self.metrics_writer and (result.status != "applied" or self.progress.step % self.config.log_every == 0):
            rate = self.updater.optimizer.param_groups[0]["lr"]
            about = {"step": self.progress.step, "epoch": self.epoch, "lr": rate, "tokens": result.num_tokens}
            kind = {} if result.status == "applied" else {result.status: 1}
            self.metrics_writer.write({**about, **result.metrics, **kind, "seconds": round(seconds, 4)})

    def save(self) -> None:
        """Commits the step, unless it is there, and deletes what need not be kept."""
        if self.run_directory is None or self.run_directory.step_path(self.progress.step).exists():
            return
        if self.metrics_writer:
            self.progress.metrics_bytes = self.metrics_writer.flush_to_disk()
        parameters = sum(p.nbytes for p in self.method.parameters())
        moments = sum(p.nbytes for p in self.method.parameters() if p.requires_grad) * 2
        self.ranks.commit_step(
            self.run_directory, self.progress.step, self.write_step, self.fingerprints, parameters + moments
        )
        if self.ranks.rank > 0:
            return
        every, best = self.config.keep_every, {step for _, step in self.progress.best}
        self.run_directory.prune_steps(
            best | {n for n in self.run_directory.step_numbers() if every and n % every == 0}
        )

    def write_step(self, writer: ManifestWriter) -> None:
        """All that a step holds."""
        checkpoint.save_model(writer, self.model_io, self.method, self.ranks)
        updating = self.updater
        checkpoint.save_training_state(
            writer, updating.optimizer, updating.scaler, updating.states, self.progress, self.ranks
        )

    def stop_and_commit(self, stop: StopSignal) -> None:
        """Commits and ends, as a signal asked."""
        self.save()
        where = (
            f"is committed in {self.run_directory.path}; run the same command again to go on"
            if self.run_directory
            else "was the last"
        )
        asked = stop.signal_name if stop.signal else "a signal to another rank"
        raise PreemptedError(f"{asked}: step {self.progress.step} of {self.num_steps} {where}")

    def close(self) -> None:
        """Closes the metrics."""
        if self.metrics_writer:
            self.metrics_writer.close()

    @property
    def result(self) -> TrainingResult:
        """What there is to say of the run so far."""
        progress = self.progress
        best = progress.best[0] if progress.best else None
        folder = self.run_directory.step_path(progress.step) if self.run_directory else None
        return TrainingResult(
            progress.step, self.last_metrics, self.last_validation, best, len(progress.skipped_steps), folder
        )


def choose_start(run: RunDirectory, resume: Resume, ranks: Ranks) -> StepFolder | None:
    """The step to go on from, checked and chosen by rank 0, which holds the run."""
    number = ranks.run_on_rank_zero(lambda: found.step if (found := find_start(run, resume)) else None)
    return (
        None
        if number is None
        else StepFolder(number, run.step_path(number), manifest.read_manifest(run.step_path(number)))
    )


def find_start(run: RunDirectory, resume: Resume) -> StepFolder | None:
    """The step to go on from; those after one asked for by number are put aside. `Busy` (73) for "never" and steps."""
    if resume == "never":
        if run.step_numbers():
            raise BusyError(f"{run.path} has {len(run.step_numbers())} steps; resume, or choose another folder")
        return None
    if resume == "auto":
        return run.latest_valid_step()
    found = run.get_step(resume)
    run.discard_after(resume)
    return found


def get_metric(metrics: Mapping[str, float], name: str) -> float:
    """One number of a validation. Raises `Usage` (2) for a name that it does not give."""
    if name not in metrics:
        raise UsageError(f"{name}: no such number in the validation; it gives {', '.join(metrics) or 'none'}")
    return metrics[name]
