"""One update: micro-batches forward and backward, one look whether all is finite, then clip and step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from laconic import rng
from laconic.config.training import TrainingConfig
from laconic.errors import OutOfMemoryError
from laconic.interfaces import AfterUpdateHook, Batch, Method, MethodState, ResetsOptimizer, StepOutput, TrainingData
from laconic.training import checkpoint
from laconic.training.optim import build_adamw, learning_rate_at
from laconic.training.ranks import Ranks

MAX_HALVINGS = 3  # of the micro-batch in one run
OptimizerBuilder = Callable[[nn.Module, TrainingConfig], torch.optim.Optimizer]
PRECISION_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UpdateIndex(NamedTuple):
    """Where in the order of data an update stands: its number, epoch, and the rows of all ranks."""

    step: int
    epoch: int
    rows: tuple[int, ...]


def compute_update_index(config: TrainingConfig, seed: int, step: int, num_rows: int) -> UpdateIndex:
    """The rows of update `step`, a pure function; nothing but the step has to be remembered.

    Where a state is carried they stand in order, so that each row goes on where it was in the update before.
    """
    epoch, i = divmod(step, config.updates_per_epoch(num_rows))
    places = np.arange(i * config.batch_size, min((i + 1) * config.batch_size, num_rows))
    return UpdateIndex(
        step, epoch, tuple((places if config.stateful else rng.permuted_index(seed, epoch, places, num_rows)).tolist())
    )


@dataclass(frozen=True)
class UpdateResult:
    """What an update found: loss, parts and gradient norm by name; whether it was applied, left out, or overflowed."""

    metrics: Mapping[str, float]
    num_tokens: int
    status: str  # "applied", "nonfinite", "overflow"


class Updater:
    """A method with its optimizer: what one update after another changes."""

    def __init__(
        self,
        method: nn.Module,
        config: TrainingConfig,
        num_steps: int,
        ranks: Ranks,
        device: torch.device,
        build_optimizer: OptimizerBuilder = build_adamw,
    ) -> None:
        self.method, self.config, self.num_steps, self.ranks, self.device = method, config, num_steps, ranks, device
        self.module = ranks.wrap(method)
        self.optimizer = build_optimizer(method, config)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self.micro_batch_size = config.micro_batch_size or math.ceil(config.batch_size / ranks.world_size)
        self.states: list[MethodState] = []
        self.reset_pending = False
        self._num_halvings = 0

    def update(self, data: TrainingData, index: UpdateIndex) -> UpdateResult:
        """One update; where a number is not finite, nothing but gradients has changed and those are gone."""
        while True:
            start = checkpoint.get_random_state()
            try:
                batches, tokens = self.make_micro_batches(data, index)
                loss, parts, states = self.backward_micro_batches(batches)
                break
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self.halve_micro_batch(error)
                checkpoint.set_random_state(start)
        if isinstance(self.method, ResetsOptimizer):
            self.reset_pending |= self.method.resets_optimizer_state(batches[0])
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = self.ranks.gradient_norm([p.grad for p in self.method.parameters() if p.grad is not None])
        numbers = self.collect_metrics(loss, parts, norm, states)
        outcome = self.classify(numbers)
        if outcome == "applied":
            self.apply_update(norm, index.step)
            self.states = states
            if isinstance(self.method, AfterUpdateHook):
                self.method.after_update(numbers)
        self.update_scaler(outcome)
        self.optimizer.zero_grad()
        return UpdateResult(numbers, tokens, outcome)

    def make_micro_batches(self, data: TrainingData, index: UpdateIndex) -> tuple[list[Any], int]:
        """This rank's micro-batches, each with the totals of the whole update; and the tokens of all.

        Ranks have equally many, since they work in step: where one has no rows left, a row of another stands in,
        whose sums are divided by infinity.
        """
        rows, world = index.rows[self.ranks.rank :: self.ranks.world_size], self.ranks.world_size
        pieces = [
            rows[i : i + self.micro_batch_size]
            for i in range(0, math.ceil(len(index.rows) / world), self.micro_batch_size)
        ]
        found: list[Any] = [data.batch(piece or index.rows[:1], index.epoch, index.step) for piece in pieces]
        counts = [cast(Method, self.method).loss_denominators(batch) for batch in found]
        own = [i for i, piece in enumerate(pieces) if piece]
        sums = [float(sum(found[i].tokens for i in own)), *(sum(counts[i][name] for i in own) for name in counts[0])]
        tokens, *summed = self.ranks.all_reduce_sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        totals = dict(zip(counts[0], summed, strict=True))
        nothing = dict.fromkeys(totals, math.inf)
        batches = [replace(batch, totals=totals if i in own else nothing) for i, batch in enumerate(found)]
        return batches, int(tokens)

    def backward_micro_batches(self, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor], list[MethodState]]:
        """Loss and parts, summed over micro-batches in float32; their gradients are in the parameters.

        The pieces of a batch are read in order, each on the state that the one before gave, cut from its graph.
        """
        total, parts, states = torch.zeros((), device=self.device), dict[str, Tensor](), list[MethodState]()
        for i, (batch, state) in enumerate(zip(batches, self.incoming_states(len(batches)), strict=True)):
            pieces = batch.sequential_parts
            for j, piece in enumerate(pieces):
                last = i == len(batches) - 1 and j == len(pieces) - 1
                with self.ranks.accumulate_gradients(self.module, last):
                    with self.autocast():
                        step: StepOutput = self.module(piece.to(self.device), state)
                    cast(Tensor, self.scaler.scale(self.ranks.scale_loss(step.loss))).backward()
                state = step.state.detach() if step.state is not None else None
                total = total + step.loss.detach().float()
                for name, part in step.metrics.items():
                    parts[name] = parts.get(name, torch.zeros_like(total)) + part.detach().float()
            if self.config.stateful and state is not None:
                states.append(state)
        return total, parts, states

    def incoming_states(self, n: int) -> Sequence[MethodState | None]:
        """What each of n micro-batches goes on from."""
        return self.states if len(self.states) == n else [None] * n

    def autocast(self) -> torch.autocast:
        """The type of number that the method computes in."""
        return torch.autocast(
            self.device.type, PRECISION_DTYPES[self.config.precision], self.config.precision != "float32"
        )

    def collect_metrics(
        self, loss: Tensor, terms: Mapping[str, Tensor], norm: Tensor, states: list[MethodState]
    ) -> dict[str, float]:
        """Every number that decides, over all ranks, fetched from the device at once."""
        held = [t for state in states for t in state.tensors().values() if t.is_floating_point() and t.numel()]
        sound = [torch.where(t.isfinite().all(), 0.0, math.nan).to(loss) for t in held]
        named = {"loss": loss, **terms} | ({"state": torch.stack(sound).sum()} if sound else {})
        summed = self.ranks.all_reduce_sum(torch.stack(list(named.values())))
        fetched: list[float] = torch.cat([summed, norm.detach().to(summed).reshape(1)]).tolist()
        found = dict(zip([*named, "grad_norm"], fetched, strict=True))
        return {name: value for name, value in found.items() if name != "state" or not math.isfinite(value)}

    def classify(self, metrics: Mapping[str, float]) -> str:
        """Whether all is finite; an overflow of scaled gradients is the scaler's as long as its scale is 1 or more."""
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad == ["grad_norm"] and self.scaler.is_enabled() and self.scaler.get_scale() >= 1:
            return "overflow"
        return "nonfinite" if bad else "applied"

    def apply_update(self, norm: Tensor, step: int) -> None:
        """Clip, and one step of the optimizer at this step's rate."""
        if self.reset_pending:
            self.optimizer.state.clear()
            self.reset_pending = False
        if self.config.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.method.parameters(), self.config.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.config, step, self.num_steps)
        try:
            self.optimizer.step()
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise OutOfMemoryError(f"no memory for the optimizer; {MEMORY_ADVICE}") from error
            raise

    def update_scaler(self, status: str) -> None:
        """The scaler after an update: the same where one was left out, else as it decides."""
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale() if status == "nonfinite" else None)

    def halve_micro_batch(self, error: BaseException) -> None:
        """Half the micro-batch after a failed allocation, at most three times in a run."""
        self.optimizer.zero_grad()
        alone = self.ranks.world_size == 1  # of several, the others are amid an exchange of gradients
        if self._num_halvings == MAX_HALVINGS or self.micro_batch_size == 1 or self.states or not alone:
            raise OutOfMemoryError(
                f"no memory for a micro-batch of {self.micro_batch_size} rows; {MEMORY_ADVICE}"
            ) from error
        self._num_halvings += 1
        self.micro_batch_size = max(1, self.micro_batch_size // 2)


MEMORY_ADVICE = 'set recompute = 1, precision = "bfloat16", what = "lora", a smaller micro or shorter rows'


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
