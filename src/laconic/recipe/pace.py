"""How long an update takes: one of few rows is done with random weights, or else a product of the model's sizes."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from laconic.core.contract import Reasoning
from laconic.core.errors import OutOfMemory
from laconic.core.families import DecoderConfig
from laconic.recipe.schema import Recipe
from laconic.recipe.sketch import filled
from laconic.training.ranks import Alone
from laconic.training.step import KINDS, Place, Updating

QUICK = {"cpu": 4e10, "cuda": 1e14}  # FLOP of an update that is done to be measured
TALL, LONG = 512, 0.2  # positions of a product that is, and seconds that are measured


class Pace(NamedTuple):
    """Seconds of an update, and how they were found."""

    seconds: float
    by: str


class Fixed:
    """One batch, whichever rows are asked for (contract.Source)."""

    fingerprint = ""

    def __init__(self, batch: Reasoning) -> None:
        self.fixed = batch

    def __len__(self) -> int:
        return self.fixed.B

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Reasoning:
        """The first of its rows."""
        return self.fixed.take(range(len(rows)))


def passes(recipe: Recipe, batch: Reasoning) -> tuple[int, int]:
    """Positions that a row is read at in an update, over all passes with a gradient, and passes."""
    asked, chain, answer = (part.shape[1] for part in (batch.question, batch.chain, batch.answer))
    how = recipe.thinking
    if how is None or "thinking" in recipe.unread:
        return asked + answer + (0 if recipe.method == "nocot" else chain), 1
    rounds = how.count if how.mode == "sequential" else how.rounds or 0
    think = 1 + how.count + (rounds * how.count if how.mode == "jacobi" else 0)
    teacher = 0 if recipe.method == "coconut" else answer
    return asked + chain + teacher + think + 1 + answer, rounds + (2 if recipe.method == "coconut" else 4)


def flop(recipe: Recipe, config: DecoderConfig, batch: Reasoning, rows: int) -> float:
    """Of an update: 2 a weight and position forward, as much for gradients of inputs, and of weights that learn."""
    D, F, L, V = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    E, H, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    block = 2 * D * H * E + 2 * D * G * E + (3 if config.gated else 2) * D * F
    positions, _ = passes(recipe, batch)
    scored = batch.answer.shape[1] * (1 if recipe.method == "nocot" else 2) + batch.chain.shape[1]
    times = (3.0 if recipe.train.what == "full" else 2.0) + (1.0 if recipe.train.recompute else 0.0)
    how = recipe.distilling
    again = batch.chain.shape[1] + batch.answer.shape[1] if how and how.codi_target == "second_pass" else 0
    return 2.0 * rows * (times * (positions * L * block + scored * D * V) + again * L * block)


def pace(
    recipe: Recipe, config: DecoderConfig, method: nn.Module, batch: Reasoning, device: torch.device, most: int
) -> Pace:
    """Seconds of an update on this device, of whose micro-batches `batch` is one and of which `most` rows fit."""
    rows, whole = min(batch.B, most), flop(recipe, config, batch, recipe.train.batch)
    quick = QUICK.get(device.type, 0.0)
    n = min(rows, int(quick / flop(recipe, config, batch, 1)))
    if n < 1:
        return Pace(whole / product(recipe, config, device), "the speed of one product of its sizes")
    try:
        seconds = measured(recipe, method, batch, device, n)
    except OutOfMemory:
        return Pace(whole / product(recipe, config, device), "the speed of one product of its sizes")
    return Pace(seconds * recipe.train.batch / n, f"an update of {n} rows, measured")


def measured(recipe: Recipe, method: nn.Module, batch: Reasoning, device: torch.device, n: int) -> float:
    """Seconds of an update of n rows with random weights, after one that warms up."""
    how = recipe.train.model_copy(update={"batch": n, "micro": n})
    updating, source = Updating(filled(method, device), how, 3, Alone(), device), Fixed(batch)
    updating.update(source, Place(batch.step, batch.epoch, tuple(range(n))))
    settled(device)
    start, done = time.perf_counter(), 0
    while done == 0 or (time.perf_counter() - start < LONG and done < 10):
        updating.update(source, Place(batch.step, batch.epoch, tuple(range(n))))
        done += 1
    settled(device)
    return (time.perf_counter() - start) / done


def product(recipe: Recipe, config: DecoderConfig, device: torch.device) -> float:
    """FLOP a second of TALL positions times the widest map."""
    D, F, kind = config.hidden_size, config.intermediate_size, KINDS[recipe.train.precision]
    x, w = (torch.ones(n, m, dtype=kind, device=device) for n, m in ((TALL, D), (D, F)))
    torch.mm(x, w)
    settled(device)
    start, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - start < LONG:
        torch.mm(x, w)
        done += 1
        settled(device)
    return 2.0 * TALL * D * F * done / (time.perf_counter() - start)


def settled(device: torch.device) -> None:
    """Waits until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
