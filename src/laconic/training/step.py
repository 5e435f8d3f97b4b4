"""One optimizer update: micro-batches forward and backward, a check that all numbers are finite, clipping, step."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from laconic.config.training import TrainingConfig
from laconic.errors import MEMORY_ADVICE, OutOfMemoryError, UsageError, is_out_of_memory
from laconic.interfaces import (
    AfterUpdateHook,
    Batch,
    MethodState,
    NormalizesLoss,
    ResetsOptimizer,
    StepOutput,
    TrainingData,
    weigh_mean_over_rows,
)
from laconic.training.metrics import LOOP_METRICS, describe_value
from laconic.training.optim import build_adamw
from laconic.training.random_state import set_random_state
from laconic.training.ranks import Ranks
from laconic.training.row_order import UpdateIndex

MAX_HALVINGS = 3  # of the micro-batch in one run
UpdateStatus = Literal["applied", "nonfinite", "overflow"]
OptimizerBuilder = Callable[[nn.Module, TrainingConfig], torch.optim.Optimizer]
PRECISION_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def learning_rate_at(config: TrainingConfig, step: int, num_steps: int, num_warmup: int) -> float:
    """Return the learning rate of update `step`, counted from 0; the first update of a warmup has rate 0."""
    if step < num_warmup:
        return config.learning_rate * step / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    decay = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
    ratio = max(0.0, decay[config.lr_schedule])
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * ratio)


class UpdateResult(NamedTuple):
    """Loss, terms and gradient norm of an update, its tokens, and what became of it."""

    metrics: Mapping[str, float]
    num_tokens: int
    status: UpdateStatus


class Updater:
    """A method with its optimizer and everything that changes from update to update.

    `num_steps` are the updates of the whole run, for the learning-rate schedule.
    """

    def __init__(
        self,
        method: nn.Module,
        config: TrainingConfig,
        num_steps: int,
        ranks: Ranks,
        device: torch.device,
        build_optimizer: OptimizerBuilder = build_adamw,
    ) -> None:
        self.method, self.config, self.num_steps = method, config, num_steps
        self.ranks, self.device = ranks, device
        self.module = ranks.wrap(method)
        self.optimizer = build_optimizer(method, config)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "float16")
        self.num_warmup = config.num_warmup_updates(num_steps)
        self.micro_batch_size = config.micro_batch_size or math.ceil(config.batch_size / ranks.world_size)
        self.states: list[MethodState] = []
        self.reset_pending = False
        self._num_halvings = 0

    def update(self, data: TrainingData, index: UpdateIndex, random_state: Mapping[str, Tensor]) -> UpdateResult:
        """Run one update; if a number is not finite, parameters, optimizer and states stay as they were.

        `random_state` is that before the update, which starts again there with smaller micro-batches if memory ends.

        Raises:
            OutOfMemoryError: If memory does not suffice with the smallest micro-batch.
        """
        while True:
            try:
                batches, num_tokens = self.make_micro_batches(data, index)
                loss, terms, states = self.backward_micro_batches(batches)
                break
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                self.optimizer.zero_grad()
                size = self.micro_batch_size
                can_halve = size > 1 and self._num_halvings < MAX_HALVINGS
                # ranks cannot repeat an exchange of gradients alone, and states belong to micro-batches of one size
                if not can_halve or self.states or self.ranks.world_size > 1:
                    text = f"out of memory with a micro-batch of {size} rows; {MEMORY_ADVICE}"
                    raise OutOfMemoryError(text) from error
                self.micro_batch_size = size // 2
                self._num_halvings += 1
                set_random_state(random_state)
        if isinstance(self.method, ResetsOptimizer):
            self.reset_pending |= self.method.resets_optimizer_state(batches[0])
        self.scaler.unscale_(self.optimizer)
        norm = self.ranks.gradient_norm([p.grad for p in self.method.parameters() if p.grad is not None])
        metrics = self.collect_metrics(loss, terms, norm, states)
        status = self.classify(metrics)
        if status == "applied":
            self.apply_update(norm, index.step)
            self.states = states
            if isinstance(self.method, AfterUpdateHook):
                self.method.after_update(metrics)
        # the scaler would lower its scale after any gradient that is not finite, but not every one is an overflow
        self.scaler.update(self.scaler.get_scale() if status == "nonfinite" else None)
        self.optimizer.zero_grad()
        return UpdateResult(metrics, num_tokens, status)

    def make_micro_batches(self, data: TrainingData, index: UpdateIndex) -> tuple[list[Any], int]:
        """Return this rank's micro-batches, with the loss denominators of the whole update, and its number of tokens.

        Every rank runs the same number of micro-batches. A rank without rows for one computes a row of another rank,
        whose loss is divided by infinity.
        """
        rank, world_size = self.ranks.rank, self.ranks.world_size
        rows = index.rows[rank::world_size]
        starts = range(0, math.ceil(len(index.rows) / world_size), self.micro_batch_size)
        parts = [rows[i : i + self.micro_batch_size] for i in starts]
        batches: list[Any] = [data.batch(part or index.rows[:1], index.epoch, index.step) for part in parts]
        counts = [get_loss_denominators(self.method, batch) for batch in batches]
        with_rows = [i for i, part in enumerate(parts) if part]
        sums = [float(sum(batches[i].num_tokens for i in with_rows))]
        sums += [sum(counts[i][name] for i in with_rows) for name in counts[0]]
        num_tokens, *totals = self.ranks.all_reduce_sum(torch.tensor(sums, dtype=torch.float64)).tolist()
        denominators = dict(zip(counts[0], totals, strict=True))
        infinite = dict.fromkeys(denominators, math.inf)
        for i, batch in enumerate(batches):
            batches[i] = replace(batch, loss_denominators=denominators if i in with_rows else infinite)
        return batches, int(num_tokens)

    def backward_micro_batches(self, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor], list[MethodState]]:
        """Accumulate gradients; return loss and terms, summed in float32, and the state after each micro-batch.

        The parts of a batch run in order, each on the detached state of the one before.
        """
        total = torch.zeros((), device=self.device)
        terms: dict[str, Tensor] = {}
        states: list[MethodState] = []
        incoming = self.states if len(self.states) == len(batches) else [None] * len(batches)
        for i, (batch, state) in enumerate(zip(batches, incoming, strict=True)):
            parts = batch.sequential_parts
            for j, part in enumerate(parts):
                is_last = i == len(batches) - 1 and j == len(parts) - 1
                with self.ranks.accumulate_gradients(self.module, is_last):
                    with self.autocast():
                        output = check_output(self.method, self.module(part.to(self.device), state))
                    if not isinstance(self.method, NormalizesLoss):
                        output = weigh_mean_over_rows(output, part, len(parts))
                    cast(Tensor, self.scaler.scale(self.ranks.scale_loss(output.loss))).backward()
                state = output.state.detach() if output.state is not None else None
                total = total + output.loss.detach().float()
                for name, term in output.metrics.items():
                    value = torch.as_tensor(term, dtype=total.dtype, device=total.device).detach()
                    terms[name] = terms.get(name, torch.zeros_like(total)) + value
            if self.config.stateful and state is not None:
                states.append(state)
        return total, terms, states

    def autocast(self) -> torch.autocast:
        dtype = PRECISION_DTYPES[self.config.precision]
        return torch.autocast(self.device.type, dtype, self.config.precision != "float32")

    def collect_metrics(
        self, loss: Tensor, terms: Mapping[str, Tensor], norm: Tensor, states: list[MethodState]
    ) -> dict[str, float]:
        """Return loss, terms and gradient norm over all ranks, fetched from the device at once.

        A non-finite state adds the metric `state`, which is NaN.
        """
        tensors = [t for state in states for t in state.tensors().values() if t.is_floating_point() and t.numel()]
        checks = [torch.where(t.isfinite().all(), 0.0, math.nan).to(loss) for t in tensors]
        named = {"loss": loss, **terms}
        if checks:
            named["state"] = torch.stack(checks).sum()
        sums = self.ranks.all_reduce_sum(torch.stack(list(named.values())))
        values: list[float] = torch.cat([sums, norm.detach().to(sums).reshape(1)]).tolist()
        metrics = dict(zip([*named, "grad_norm"], values, strict=True))
        if math.isfinite(metrics.get("state", math.nan)):
            del metrics["state"]
        return metrics

    def classify(self, metrics: Mapping[str, float]) -> UpdateStatus:
        """Return the status of an update; single terms of its loss may be NaN.

        Gradients that alone are not finite are an overflow as long as the float16 scale can be lowered.
        """
        bad = [name for name in ("loss", "grad_norm", "state") if not math.isfinite(metrics.get(name, 0.0))]
        if bad == ["grad_norm"] and self.scaler.is_enabled() and self.scaler.get_scale() >= 1:
            return "overflow"
        return "nonfinite" if bad else "applied"

    def apply_update(self, norm: Tensor, step: int) -> None:
        """Clip the gradients and run the optimizer at this step's learning rate."""
        if self.reset_pending:
            self.optimizer.state.clear()
            self.reset_pending = False
        max_norm = self.config.max_grad_norm
        if max_norm:
            foreach = False if self.ranks.is_sharded else None  # one call cannot mix shards with whole scalars
            torch.nn.utils.clip_grads_with_norm_(self.method.parameters(), max_norm, norm, foreach=foreach)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.config, step, self.num_steps, self.num_warmup)
        try:
            self.optimizer.step()
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise OutOfMemoryError(f"out of memory in the optimizer; {MEMORY_ADVICE}") from error
            raise


def check_output(method: nn.Module, output: object) -> StepOutput:
    """Return what a method's `forward` returned. Raises `UsageError` if it is not a loss with scalar metrics."""
    name = f"{type(method).__name__}.forward returned"
    if not isinstance(output, StepOutput):
        raise UsageError(f"{name} {describe_value(output)}; return laconic.interfaces.StepOutput(loss, metrics)")
    loss: object = output.loss
    if not isinstance(loss, Tensor) or loss.shape or not loss.requires_grad:
        raise UsageError(f"{name} {describe_value(loss)} as loss; return a scalar that depends on trained parameters")
    for key, value in cast(Mapping[str, object], output.metrics).items():
        if key in LOOP_METRICS:
            raise UsageError(f"{name} a metric named {key}, which the training loop writes itself; rename it")
        if not isinstance(value, int | float) and (not isinstance(value, Tensor) or value.shape):
            raise UsageError(f"{name} {describe_value(value)} as metric {key}; return a number or a scalar tensor")
    return output


def get_loss_denominators(method: nn.Module, batch: Batch) -> Mapping[str, float]:
    """Return a method's denominators of a batch, or the number of rows for one whose loss is a mean over rows."""
    return method.loss_denominators(batch) if isinstance(method, NormalizesLoss) else {"rows": float(batch.B)}
