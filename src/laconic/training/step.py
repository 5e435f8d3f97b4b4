"""One update: micro-batches forward and backward, one look whether all is finite, then clip and step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from laconic.core import keyed
from laconic.core.contract import Batch, Method, Source, State, Steered, Step
from laconic.core.errors import OutOfMemory
from laconic.training import checkpoint
from laconic.training.optim import adamw, rate
from laconic.training.ranks import Ranks
from laconic.training.settings import Training

HALVINGS = 3  # of the micro-batch in one run
Optimizers = Callable[[nn.Module, Training], torch.optim.Optimizer]
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Place(NamedTuple):
    """Where in the order of data an update stands: its number, epoch, and the rows of all ranks."""

    step: int
    epoch: int
    rows: tuple[int, ...]


def place(how: Training, seed: int, step: int, n: int) -> Place:
    """The rows of update `step`, a pure function; nothing but the step has to be remembered.

    Where a state is carried they stand in order, so that each row goes on where it was in the update before.
    """
    epoch, i = divmod(step, how.per_epoch(n))
    places = np.arange(i * how.batch, min((i + 1) * how.batch, n))
    return Place(step, epoch, tuple((places if how.carry else keyed.index(seed, epoch, places, n)).tolist()))


@dataclass(frozen=True)
class Did:
    """What an update found: loss, parts and gradient norm by name; whether it was applied, left out, or overflowed."""

    numbers: Mapping[str, float]
    tokens: int
    outcome: str  # "applied", "nonfinite", "overflow"


class Updating:
    """A method with its optimizer: what one update after another changes."""

    def __init__(
        self,
        method: nn.Module,
        how: Training,
        steps: int,
        ranks: Ranks,
        device: torch.device,
        optimizer: Optimizers = adamw,
    ) -> None:
        self.method, self.how, self.steps, self.ranks, self.device = method, how, steps, ranks, device
        self.module = ranks.wrap(method)
        self.optimizer = optimizer(method, how)
        self.scaler = torch.amp.GradScaler(device.type, enabled=how.precision == "float16")
        self.micro = how.micro or math.ceil(how.batch / ranks.world)
        self.states: list[State] = []
        self.restart = False
        self._halvings = 0

    def update(self, source: Source, at: Place) -> Did:
        """One update; where a number is not finite, nothing but gradients has changed and those are gone."""
        while True:
            start = checkpoint.random_state()
            try:
                batches, tokens = self.batches(source, at)
                loss, parts, states = self.descend(batches)
                break
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                self.halve(error)
                checkpoint.set_random_state(start)
        self.restart |= cast(Method, self.method).restarts(batches[0])
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = self.ranks.norm([p.grad for p in self.method.parameters() if p.grad is not None])
        numbers = self.looked_at(loss, parts, norm, states)
        outcome = self.judged(numbers)
        if outcome == "applied":
            self.apply(norm, at.step)
            self.states = states
            if isinstance(self.method, Steered):
                self.method.steer(numbers)
        self.scale(outcome)
        self.optimizer.zero_grad()
        return Did(numbers, tokens, outcome)

    def batches(self, source: Source, at: Place) -> tuple[list[Any], int]:
        """This rank's micro-batches, each with the totals of the whole update; and the tokens of all.

        Ranks have equally many, since they work in step: where one has no rows left, a row of another stands in,
        whose sums are divided by infinity.
        """
        rows, world = at.rows[self.ranks.rank :: self.ranks.world], self.ranks.world
        pieces = [rows[i : i + self.micro] for i in range(0, math.ceil(len(at.rows) / world), self.micro)]
        found: list[Any] = [source.batch(piece or at.rows[:1], at.epoch, at.step) for piece in pieces]
        counts = [cast(Method, self.method).totals(batch) for batch in found]
        own = [i for i, piece in enumerate(pieces) if piece]
        sums = [float(sum(found[i].tokens for i in own)), *(sum(counts[i][name] for i in own) for name in counts[0])]
        tokens, *summed = self.ranks.sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        totals = dict(zip(counts[0], summed, strict=True))
        nothing = dict.fromkeys(totals, math.inf)
        batches = [replace(batch, totals=totals if i in own else nothing) for i, batch in enumerate(found)]
        return batches, int(tokens)

    def descend(self, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor], list[State]]:
        """Loss and parts, summed over micro-batches in float32; their gradients are in the parameters.

        The pieces of a batch are read in order, each on the state that the one before gave, cut from its graph.
        """
        total, parts, states = torch.zeros((), device=self.device), dict[str, Tensor](), list[State]()
        for i, (batch, state) in enumerate(zip(batches, self.carried(len(batches)), strict=True)):
            pieces = batch.pieces
            for j, piece in enumerate(pieces):
                last = i == len(batches) - 1 and j == len(pieces) - 1
                with self.ranks.accumulating(self.module, last):
                    with self.computing():
                        step: Step = self.module(piece.to(self.device), state)
                    cast(Tensor, self.scaler.scale(self.ranks.scaled(step.loss))).backward()
                state = step.state.detach() if step.state is not None else None
                total = total + step.loss.detach().float()
                for name, part in step.parts.items():
                    parts[name] = parts.get(name, torch.zeros_like(total)) + part.detach().float()
            if self.how.carry and state is not None:
                states.append(state)
        return total, parts, states

    def carried(self, n: int) -> Sequence[State | None]:
        """What each of n micro-batches goes on from."""
        return self.states if len(self.states) == n else [None] * n

    def computing(self) -> torch.autocast:
        """The type of number that the method computes in."""
        return torch.autocast(self.device.type, KINDS[self.how.precision], self.how.precision != "float32")

    def looked_at(
        self, loss: Tensor, parts: Mapping[str, Tensor], norm: Tensor, states: list[State]
    ) -> dict[str, float]:
        """Every number that decides, over all ranks, fetched from the device at once."""
        held = [t for state in states for t in state.tensors().values() if t.is_floating_point() and t.numel()]
        sound = [torch.where(t.isfinite().all(), 0.0, math.nan).to(loss) for t in held]
        named = {"loss": loss, **parts} | ({"state": torch.stack(sound).sum()} if sound else {})
        summed = self.ranks.sum(torch.stack(list(named.values())))
        fetched: list[float] = torch.cat([summed, norm.detach().to(summed).reshape(1)]).tolist()
        found = dict(zip([*named, "grad_norm"], fetched, strict=True))
        return {name: value for name, value in found.items() if name != "state" or not math.isfinite(value)}

    def judged(self, numbers: Mapping[str, float]) -> str:
        """Whether all is finite; an overflow of scaled gradients is the scaler's as long as its scale is 1 or more."""
        bad = [name for name, value in numbers.items() if not math.isfinite(value)]
        if bad == ["grad_norm"] and self.scaler.is_enabled() and self.scaler.get_scale() >= 1:
            return "overflow"
        return "nonfinite" if bad else "applied"

    def apply(self, norm: Tensor, step: int) -> None:
        """Clip, and one step of the optimizer at this step's rate."""
        if self.restart:
            self.optimizer.state.clear()
            self.restart = False
        if self.how.clip:
            torch.nn.utils.clip_grads_with_norm_(self.method.parameters(), self.how.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.how, step, self.steps)
        try:
            self.optimizer.step()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise OutOfMemory(f"no memory for the optimizer; {PLAN}") from error
            raise

    def scale(self, outcome: str) -> None:
        """The scaler after an update: the same where one was left out, else as it decides."""
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale() if outcome == "nonfinite" else None)

    def halve(self, error: BaseException) -> None:
        """Half the micro-batch after a failed allocation, at most three times in a run."""
        self.optimizer.zero_grad()
        alone = self.ranks.world == 1  # of several, the others are amid an exchange of gradients
        if self._halvings == HALVINGS or self.micro == 1 or self.states or not alone:
            raise OutOfMemory(f"no memory for a micro-batch of {self.micro} rows; {PLAN}") from error
        self._halvings += 1
        self.micro = max(1, self.micro // 2)


PLAN = 'set recompute = 1, precision = "bfloat16", what = "lora", a smaller micro or shorter rows'


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
