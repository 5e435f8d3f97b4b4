"""How long an update takes: one of few rows is done with random weights, or else a product of the model's sizes."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from laconic.batches import DocumentBatch, ReasoningBatch
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.memory_policy import num_summary_positions
from laconic.config.recipe import Recipe
from laconic.errors import OutOfMemoryError
from laconic.experiment import build_nested
from laconic.experiment.build_data import max_memory_slots
from laconic.experiment.need_learning import work
from laconic.experiment.optimizers import optimizer
from laconic.experiment.sketch import filled
from laconic.interfaces import Batch
from laconic.models.config import DecoderConfig
from laconic.training.ranks import SingleProcess
from laconic.training.step import PRECISION_DTYPES, UpdateIndex, Updater

QUICK = {"cpu": 4e10, "cuda": 1e14}  # FLOP of an update that is done to be measured
TALL, LONG = 512, 0.2  # positions of a product that is, and seconds that are measured


class Pace(NamedTuple):
    """Seconds of an update, and how they were found."""

    seconds: float
    by: str


class Reads(NamedTuple):
    """What a row of a piece is read at in an update, over all passes with a gradient: `positions`; those held whose
    keys and values passes join to their own; tokens `scored`; positions read without a gradient, and scored so."""

    positions: int
    joined: int
    scored: int
    free: int = 0
    free_scored: int = 0


class Fixed:
    """One batch, whichever rows are asked for (contract.Source)."""

    fingerprint = ""

    def __init__(self, batch: Batch) -> None:
        self.fixed = batch

    def __len__(self) -> int:
        return self.fixed.B

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Batch:
        """The first of its rows."""
        return cast(Any, self.fixed).take(range(len(rows)))


def reads(recipe: Recipe, piece: Batch, head: bool = False) -> Reads:
    """What a row of a piece is read at; `head`: while the head alone learns how long a memory is."""
    if isinstance(piece, DocumentBatch):
        return read_documents(recipe, piece, head)
    batch = cast(ReasoningBatch, piece)
    asked, chain, answer = (part.shape[1] for part in (batch.question_ids, batch.chain_ids, batch.answer_ids))
    how = recipe.latents
    scored = answer * (1 if recipe.method == "nocot" else 2) + chain
    if how is None or "latents" in recipe.unused_tables:
        return Reads(asked + answer + (0 if recipe.method == "nocot" else chain), asked, scored)
    rounds = how.num_latents if how.schedule == "sequential" else how.jacobi_iterations or 0
    think = 1 + how.num_latents + (rounds * how.num_latents if how.schedule == "jacobi" else 0)
    teacher = 0 if recipe.method == "coconut" else answer
    passes = rounds + (2 if recipe.method == "coconut" else 4)
    return Reads(asked + chain + teacher + think + 1 + answer, passes * asked, scored)


def read_documents(recipe: Recipe, piece: DocumentBatch, head: bool) -> Reads:
    """The same of a window: the memory that can stand before each segment, its text, and places behind it."""
    how, texts = recipe.compression, [s.stop - s.start for s in piece.segment_slices]
    scored = int(piece.loss_mask.sum(1).max())
    if how is None or "compression" in recipe.unused_tables:
        return Reads(sum(texts), 0, scored)
    together, loops = how.reread_memory and how.adapter_scope == "both", how.summary == "autoregressive"
    compressions = max(len(texts) - 1, piece.carried_segments or 0)
    if recipe.stop_head and recipe.stop_head.cost_on == "all" and how.length_policy == "stop_head":
        compressions = len(texts)
    positions = joined = 0
    for i, text in enumerate(texts):
        memory = max_memory_slots(how, piece.first_segment + i)
        prompt = memory if how.reread_memory else 0
        if i < compressions:
            positions += prompt + text + num_summary_positions(how) + (0 if together else memory + text)
            joined += how.fixed_length * (prompt + text) if loops else 0
        else:
            positions += memory + text
    if not head:
        return Reads(positions, joined, scored)
    tried = sum(max_memory_slots(how, piece.first_segment + i) + text for i, text in enumerate(texts) if i)
    lengths = len(how.possible_lengths)
    return Reads(0, 0, 0, positions + lengths * tried, scored * (1 + lengths))


def flop(recipe: Recipe, config: DecoderConfig, batch: Batch, rows: int, head: bool = False) -> float:
    """Of an update: 2 a weight and position forward, as much for gradients of inputs, and of weights that learn."""
    D, F, L, V = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    E, H, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    block = 2 * D * H * E + 2 * D * G * E + (3 if config.gated_mlp else 2) * D * F
    each = [reads(recipe, piece, head) for piece in batch.sequential_parts]
    positions, scored = sum(one.positions for one in each), sum(one.scored for one in each)
    free, free_scored = sum(one.free for one in each), sum(one.free_scored for one in each)
    again = recipe.train.activation_checkpointing or (
        recipe.compression is not None and recipe.compression.checkpoint_segments
    )
    times = (3.0 if recipe.train.trainable == "full" else 2.0) + (1.0 if again else 0.0)
    if recipe.method == "hope" and recipe.inner_loop is not None:
        shape = build_nested.build_hope_config(recipe, config, donor=recipe.model.family is None)
        return rows * positions * (times * work(shape, recipe.inner_loop)) + 2.0 * rows * times * scored * D * V
    how = recipe.distillation
    if how and how.teacher_pass == "second_pass" and isinstance(batch, ReasoningBatch):
        free += batch.chain_ids.shape[1] + batch.answer_ids.shape[1]
    return 2.0 * rows * (times * (positions * L * block + scored * D * V) + free * L * block + free_scored * D * V)


def pace(
    recipe: Recipe, config: DecoderConfig, method: nn.Module, batch: Batch, device: torch.device, most: int
) -> Pace:
    """Seconds of an update on this device, of whose micro-batches `batch` is one and of which `most` rows fit."""
    head = isinstance(method, AutoCompressor) and method.training_phase(cast(DocumentBatch, batch).step) == "head_only"
    rows, whole = min(batch.B, most), flop(recipe, config, batch, recipe.train.batch_size, head)
    quick = QUICK.get(device.type, 0.0)
    n = min(rows, int(quick / flop(recipe, config, batch, 1, head)))
    if n < 1:
        return Pace(whole / product(recipe, config, device), "the speed of one product of its sizes")
    try:
        seconds = measured(recipe, method, batch, device, n)
    except OutOfMemoryError:
        return Pace(whole / product(recipe, config, device), "the speed of one product of its sizes")
    return Pace(seconds * recipe.train.batch_size / n, f"an update of {n} rows, measured")


def measured(recipe: Recipe, method: nn.Module, batch: Batch, device: torch.device, n: int) -> float:
    """Seconds of an update of n rows with random weights, after one that warms up."""
    at = cast(ReasoningBatch | DocumentBatch, batch)
    how = recipe.train.model_copy(update={"batch_size": n, "micro_batch_size": n})
    updating, source = Updater(filled(method, device), how, 3, SingleProcess(), device, optimizer), Fixed(batch)
    updating.update(source, UpdateIndex(at.step, at.epoch, tuple(range(n))))
    settled(device)
    start, done = time.perf_counter(), 0
    while done == 0 or (time.perf_counter() - start < LONG and done < 10):
        updating.update(source, UpdateIndex(at.step, at.epoch, tuple(range(n))))
        done += 1
    settled(device)
    return (time.perf_counter() - start) / done


def product(recipe: Recipe, config: DecoderConfig, device: torch.device) -> float:
    """FLOP a second of TALL positions times the widest map."""
    D, F, kind = config.hidden_size, config.intermediate_size, PRECISION_DTYPES[recipe.train.precision]
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
