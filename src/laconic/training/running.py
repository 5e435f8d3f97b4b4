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

from laconic.core import keyed, manifest
from laconic.core.contract import Source
from laconic.core.decoder import Decoder
from laconic.core.errors import Busy, Damaged, NonFinite, Preempted, Usage
from laconic.core.manifest import Files
from laconic.core.runs import Committed, RunFolder
from laconic.training import checkpoint, incident
from laconic.training.checkpoint import Model, Progress
from laconic.training.log import Metrics
from laconic.training.optim import adamw
from laconic.training.ranks import Ranks
from laconic.training.settings import Training
from laconic.training.signals import Interrupted, Stop
from laconic.training.step import Did, Optimizers, Updating, place

SKIPS, WINDOW = 3, 100  # updates that may be left out, in how many
SHOWN = 6  # numbers of an update on the line of progress; all are in metrics.jsonl
NAMED = 4  # numbers that an error names
Show = Callable[[str, int, int], None]
Validate = Callable[[int], Mapping[str, float]]  # of the epoch of the last update
Resume = Literal["auto", "never"] | int


@dataclass(frozen=True)
class Outcome:
    """What a run came to: updates tried, the last loss and parts, the last validation, the best (metric, step)."""

    steps: int
    numbers: Mapping[str, float]
    validation: Mapping[str, float]
    best: tuple[float, int] | None
    skipped: int
    folder: Path | None


class Running:
    """A run under way: what is updated, how far it is, and its directory."""

    def __init__(
        self,
        method: nn.Module,
        source: Source,
        how: Training,
        run: RunFolder | None,
        seed: int,
        model: Model,
        bound: Mapping[str, str],
        ranks: Ranks,
        device: torch.device | str,
        start: Committed | None = None,
        optimizer: Optimizers = adamw,
    ) -> None:
        self.method, self.source, self.how, self.run, self.seed, self.model = method, source, how, run, seed, model
        self.bound = {"data": source.fingerprint, **bound}
        self.ranks, self.device = ranks, torch.device(device)
        self.steps = how.length(len(source))
        for module in method.modules():
            if isinstance(module, Decoder):
                module.recompute = how.recompute
        if start:
            self.check_bound(start)
            checkpoint.load_model(start.folder, model, method)
        method.to(self.device).train()
        torch.manual_seed(seed if ranks.rank == 0 else int(keyed.mix(seed, ranks.rank)) >> 1)
        self.updating = Updating(method, how, self.steps, ranks, self.device, optimizer)
        self.progress = Progress(micro=self.updating.micro)
        self.metrics: Metrics | None = None
        self.done = False
        self.numbers: Mapping[str, float] = {}
        self.validation: Mapping[str, float] = {}
        if start:
            self.restore(start)

    def begin(self, track: str | None = None) -> None:
        """Opens the metrics behind the step that was resumed from."""
        if self.run is not None and self.ranks.rank == 0:
            self.metrics = Metrics(self.run.path / "metrics.jsonl", self.progress.bytes, track)

    def check_bound(self, start: Committed) -> None:
        """Raises `Damaged` (76) for a step of other rows, another base or recipe."""
        for name, ours in self.bound.items():
            theirs = start.manifest.bound.get(name)
            if theirs != ours:
                raise Damaged(f"{start.folder} was made with {name} {theirs}, this run has {ours}; take those again")

    def restore(self, start: Committed) -> None:
        """Optimizer, random numbers, states and progress of a step, whose parameters are in the method."""
        updating = self.updating
        self.progress, updating.states = checkpoint.load(
            start.folder, updating.optimizer, updating.scaler, self.ranks.rank
        )
        updating.states = [state.to(self.device) for state in updating.states]
        updating.micro, updating.restart = self.progress.micro, self.progress.restart

    def go(self, stop: Stop, validate: Validate | None, show: Show | None) -> None:
        """Updates until the end, with validation, checkpoints and the end that a signal asks for in between."""
        first = self.progress.step
        while True:
            saved = self.validated(stop, validate) if self.due(validate) else False
            over = self.done or self.progress.step >= self.steps
            if over or saved or (self.progress.step % self.how.save_every == 0 and self.progress.step > first):
                self.save()
            if over:
                return
            if self.ranks.any(bool(stop.signal)):
                self.preempted(stop)
            started = time.monotonic()
            did = self.advance()
            self.log(did, time.monotonic() - started)
            if show and self.ranks.rank == 0:
                speed = did.tokens / max(1e-9, time.monotonic() - started)
                parts = " · ".join(f"{name} {value:.4g}" for name, value in [*did.numbers.items()][:SHOWN])
                show(f"{parts} · {speed:,.0f} tokens/s", self.progress.step - first, self.steps - first)

    def advance(self) -> Did:
        """One update and what it means for the progress. Raises `NonFinite` where the policy says so."""
        at = place(self.how, self.seed, self.progress.step, len(self.source))
        before = checkpoint.random_state()
        did = self.updating.update(self.source, at)
        if did.outcome == "nonfinite":
            self.left_out(did, before)
        self.numbers = did.numbers
        progress = self.progress
        progress.step += 1
        progress.epoch, progress.index = divmod(progress.step, self.how.per_epoch(len(self.source)))
        progress.index *= self.how.batch
        progress.overflows += did.outcome == "overflow"
        progress.micro, progress.restart = self.updating.micro, self.updating.restart
        return did

    def left_out(self, did: Did, before: checkpoint.Tensors) -> None:
        """An update with a number that is not finite: left out, or the end of the run with an incident."""
        step, progress = self.progress.step, self.progress
        recent = [n for n in progress.skips if n > step - WINDOW]
        if self.how.nonfinite == "skip" and len(recent) < SKIPS:
            progress.skips = [*recent, step]
            return
        checkpoint.set_random_state(before)
        with suppress(NonFinite):  # what led here may be in the weights; then the last good step stays the newest
            self.save()
        at = place(self.how, self.seed, step, len(self.source))
        bad = [name for name, value in did.numbers.items() if not math.isfinite(value)]
        more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
        where = incident.dump(self.updating, self.source, at, did, before, self.run)
        names = ", ".join(bad[:NAMED])
        raise NonFinite(f"step {step + 1}: {names}{more} not finite; the update was not applied{where}")

    @property
    def epoch(self) -> int:
        """That of the last update."""
        return (self.progress.step - 1) // self.how.per_epoch(len(self.source))

    def due(self, validate: Validate | None) -> bool:
        """Whether this step is to be validated and was not: every so many, and the last."""
        step, every = self.progress.step, self.how.validate_every
        now = step >= self.steps or (every is not None and step > 0 and step % every == 0)
        return validate is not None and now and self.progress.validated != step

    def validated(self, stop: Stop, validate: Validate | None) -> bool:
        """Validates, which leaves no trace but its numbers; says whether the step is among the best."""
        assert validate is not None
        before, found = checkpoint.random_state(), dict[str, float]()
        try:
            with stop.leaving() if self.ranks.world == 1 else nullcontext(), self.ranks.answering(self.method):
                self.method.eval()
                found = {name: float(value) for name, value in validate(self.epoch).items()}
            found = self.ranks.exchange(found)[0]
        except Interrupted:
            stop.left = True
        finally:
            self.method.train()
            checkpoint.set_random_state(before)
        if stop.left:  # committed as it was before
            self.preempted(stop)
        self.validation = found
        step, how = self.progress.step, self.how
        self.progress.validated = step
        if self.metrics:
            self.metrics.line({"step": step, "validation": found})
        goal = how.stop_when
        self.done = goal is not None and named(found, goal.metric) >= goal.at_least
        return how.best is not None and self.ranked(named(found, how.best), step)

    def ranked(self, value: float, step: int) -> bool:
        """Puts a validated step into the list of the best; whether it has a place there."""
        if not math.isfinite(value):
            return False
        sign = -1 if self.how.best_is == "largest" else 1
        best = sorted([*self.progress.best, (value, step)], key=lambda item: (sign * item[0], item[1]))
        self.progress.best = best[: self.how.keep_best]
        return (value, step) in self.progress.best

    def log(self, did: Did, seconds: float) -> None:
        """A line of metrics; what was not applied is logged always, with nulls and its kind."""
        if self.metrics and (did.outcome != "applied" or self.progress.step % self.how.log_every == 0):
            rate = self.updating.optimizer.param_groups[0]["lr"]
            about = {"step": self.progress.step, "epoch": self.epoch, "lr": rate, "tokens": did.tokens}
            kind = {} if did.outcome == "applied" else {did.outcome: 1}
            self.metrics.line({**about, **did.numbers, **kind, "seconds": round(seconds, 4)})

    def save(self) -> None:
        """Commits the step, unless it is there, and deletes what need not be kept."""
        if self.run is None or self.run.step(self.progress.step).exists():
            return
        if self.metrics:
            self.progress.bytes = self.metrics.sync()
        parameters = sum(p.nbytes for p in self.method.parameters())
        moments = sum(p.nbytes for p in self.method.parameters() if p.requires_grad) * 2
        self.ranks.commit(self.run, self.progress.step, self.write, self.bound, parameters + moments)
        if self.ranks.rank > 0:
            return
        every, best = self.how.keep_every, {step for _, step in self.progress.best}
        self.run.retain(best | {n for n in self.run.numbers() if every and n % every == 0})

    def write(self, files: Files) -> None:
        """All that a step holds."""
        checkpoint.save_model(files, self.model, self.method, self.ranks)
        updating = self.updating
        checkpoint.save(files, updating.optimizer, updating.scaler, updating.states, self.progress, self.ranks)

    def preempted(self, stop: Stop) -> None:
        """Commits and ends, as a signal asked."""
        self.save()
        where = f"is committed in {self.run.path}; run the same command again to go on" if self.run else "was the last"
        asked = stop.name if stop.signal else "a signal to another rank"
        raise Preempted(f"{asked}: step {self.progress.step} of {self.steps} {where}")

    def end(self) -> None:
        """Closes the metrics."""
        if self.metrics:
            self.metrics.close()

    @property
    def outcome(self) -> Outcome:
        """What there is to say of the run so far."""
        progress = self.progress
        best = progress.best[0] if progress.best else None
        folder = self.run.step(progress.step) if self.run else None
        return Outcome(progress.step, self.numbers, self.validation, best, len(progress.skips), folder)


def started(run: RunFolder, resume: Resume, ranks: Ranks) -> Committed | None:
    """The step to go on from, checked and chosen by rank 0, which holds the run."""
    number = ranks.first(lambda: found.number if (found := chosen(run, resume)) else None)
    return None if number is None else Committed(number, run.step(number), manifest.read(run.step(number)))


def chosen(run: RunFolder, resume: Resume) -> Committed | None:
    """The step to go on from; those after one asked for by number are put aside. `Busy` (73) for "never" and steps."""
    if resume == "never":
        if run.numbers():
            raise Busy(f"{run.path} has {len(run.numbers())} steps; resume, or choose another folder")
        return None
    if resume == "auto":
        return run.newest()
    found = run.asked(resume)
    run.forget_after(resume)
    return found


def named(found: Mapping[str, float], name: str) -> float:
    """One number of a validation. Raises `Usage` (2) for a name that it does not give."""
    if name not in found:
        raise Usage(f"{name}: no such number in the validation; it gives {', '.join(found) or 'none'}")
    return found[name]
