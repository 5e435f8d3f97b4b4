"""The training loop, which knows no method: `train` a run to its end, `replay` an update that went wrong."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from laconic.core.contract import Source
from laconic.core.errors import BadInput
from laconic.core.runs import RunFolder
from laconic.training import checkpoint, incident
from laconic.training.checkpoint import Model, Plain
from laconic.training.optim import adamw
from laconic.training.ranks import Alone, Ranks
from laconic.training.running import Outcome, Resume, Running, Show, Validate, started
from laconic.training.settings import Training
from laconic.training.signals import heard
from laconic.training.step import Optimizers, place


def train(
    method: nn.Module,
    source: Source,
    how: Training,
    *,
    run: RunFolder | None = None,
    seed: int = 0,
    model: Model | None = None,
    bound: Mapping[str, str] | None = None,
    validate: Validate | None = None,
    show: Show | None = None,
    ranks: Ranks | None = None,
    device: torch.device | str = "cpu",
    optimizer: Optimizers = adamw,
    resume: Resume = "auto",
    track: str | None = None,
) -> Outcome:
    """Trains until the steps are done or `how.stop_when` is reached; with a `run`, which the caller holds, on disk.

    `model` writes and reads the model part of a step; default: all tensors of the method as they are called there.
    `bound` are SHA-256 values of what a step belongs to (recipe, base); the rows' is added. `optimizer` makes that of
    what is trained. `resume`: "auto" goes on from the newest good step, "never" refuses a directory with steps, a
    number is that step. A resumed run equals the one that never stopped, bit for bit, on the same build, device type
    and layout.

    Raises `NonFinite` (65) with an incident, `BadInput` (66), `OutOfMemory` (71), `Busy` (73), `NoSpace` (74),
    `Preempted` (75) after a signal, `Damaged` (76).
    """
    if len(source) < how.batch:
        raise BadInput(f"train: {len(source)} rows, a batch has {how.batch}; take a smaller batch or more rows")
    with kernels(how, torch.device(device)), heard() as stop:
        model, ranks = model or Plain(method), ranks or Alone()
        start = started(run, resume, ranks) if run else None
        training = Running(method, source, how, run, seed, model, bound or {}, ranks, device, start, optimizer)
        training.begin(track)
        try:
            training.go(stop, validate, show)
        finally:
            training.end()
        return training.outcome


def replay(
    method: nn.Module,
    source: Source,
    how: Training,
    *,
    run: RunFolder,
    step: int,
    seed: int = 0,
    model: Model | None = None,
    bound: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
    device: torch.device | str = "cpu",
    optimizer: Optimizers = adamw,
) -> dict[str, Any]:
    """Goes to the update that gave incidents/step-N, by N = `step`, and repeats it; what it gives is the incident."""
    with kernels(how, torch.device(device)):
        model, ranks = model or Plain(method), ranks or Alone()
        earlier = [number for number in run.numbers() if number < step]
        start = run.asked(earlier[-1]) if earlier else None
        running = Running(method, source, how, None, seed, model, bound or {}, ranks, device, start, optimizer)
        while running.progress.step < step - 1:
            running.advance()
        at = place(how, seed, step - 1, len(source))
        before = checkpoint.random_state()
        did = running.updating.update(source, at)
        return incident.explain(running.updating, source, at, did, before)


@contextmanager
def kernels(how: Training, device: torch.device) -> Iterator[None]:
    """Deterministic kernels inside: on a CPU always, on a GPU where the recipe asks for them.

    On a CPU numbers below the normal range count as 0 too: sharp attention is full of them, and each costs a
    hundred others.
    """
    before, memory = torch.are_deterministic_algorithms_enabled(), cast(Any, torch.utils.deterministic)
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(before or how.deterministic or device.type == "cpu")
    memory.fill_uninitialized_memory = False
    torch.set_flush_denormal(device.type == "cpu")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fill
