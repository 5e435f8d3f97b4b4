"""What a run would take, before it is begun: sizes, steps, memory, time and disk; no weight is read.

Where one update is small enough for the device at hand, two are done with random weights of the same sizes, and time
and memory are those measured. Elsewhere memory is counted: weights, gradients, AdamW's two moments, what the blocks
keep for the backward pass, and logits.
"""

import resource
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from laconic.core.contract import Reasoning, Source
from laconic.core.decoder import Decoder
from laconic.core.families import DecoderConfig
from laconic.data.tokens import Tokenizer
from laconic.recipe import models
from laconic.recipe.methods import method_of
from laconic.recipe.models import Parts
from laconic.recipe.opened import described
from laconic.recipe.rows import Rows, training
from laconic.recipe.schema import Recipe
from laconic.training.ranks import Alone
from laconic.training.step import Updating, place

SAMPLE = 5000  # rows looked at, of a file that has more
LENGTHS = 512  # rows whose lengths are told
QUICK = {"cpu": 3e11, "cuda": 3e14}  # FLOP of an update that is done to be measured
MEASURED = 2  # updates, after one that warms up
PARTS = ("question", "chain", "answer")


def plan(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Everything `laconic train --plan` tells."""
    config, tokenizer = described(recipe)
    models.check_context(recipe, config)
    rows, n = sampled(recipe, tokenizer, config.max_position_embeddings)
    how = recipe.train
    with torch.device("meta"):
        decoder = Decoder(config, seed=None)
    parts = models.fresh(plainly(recipe), decoder, tokenizer, "")
    method = method_of(parts, recipe, how.per_epoch(n))
    sizes, steps = counted(method), how.length(n)
    first = cast(Reasoning, rows.source.batch(range(min(how.batch, LENGTHS, len(rows.source))), 0, 0))
    micro = min(how.micro or how.batch, how.batch)
    work, memory = flop(recipe, config, first, how.batch), counted_memory(recipe, config, first, sizes, micro)
    found: dict[str, Any] = {
        "schema": 1,
        "method": recipe.method,
        **sizes,
        "rows": n,
        "steps": steps,
        "steps_per_epoch": how.per_epoch(n),
        "lengths": lengths(first),
        "notes": list(rows.notes),
        "flop_per_step": work,
        "memory": {"bytes": memory, "by": "counted"},
        "seconds": None,
        "disk": disk(recipe, sizes),
    }
    if work <= QUICK.get(device.type, 0):
        seconds, peak = measured(recipe, config, tokenizer, rows.source, device)
        found |= {"seconds": {"step": seconds, "run": seconds * steps}, "memory": {"bytes": peak, "by": "measured"}}
    return found


def plainly(recipe: Recipe) -> Recipe:
    """The recipe with thoughts that start without a look at the weights."""
    if recipe.thinking is None:
        return recipe
    return recipe.model_copy(update={"thinking": recipe.thinking.model_copy(update={"project_scale": "unit"})})


def sampled(recipe: Recipe, tokenizer: Tokenizer, context: int) -> tuple[Rows, int]:
    """Rows to look at, and how many there are; of a long file the first ones, and as many as it has lines."""
    data = recipe.data
    if data.kind == "digits" or data.path is None:
        rows = training(recipe, tokenizer, context)
        return rows, len(rows.source)
    with Path(data.path).open("rb") as file:
        there = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    n = min(there, data.rows or there)
    some = recipe.model_copy(update={"data": data.model_copy(update={"rows": min(n, SAMPLE) or None})})
    rows = training(some, tokenizer, context)
    if n <= SAMPLE:
        return rows, len(rows.source)
    return rows._replace(notes=(f"of the first {SAMPLE:,} rows:", *rows.notes)), n * len(rows.source) // SAMPLE


def counted(method: nn.Module) -> dict[str, int]:
    """Parameters in all, those that learn, and the bytes they lie in."""
    held = list(method.parameters())
    learn = [p for p in held if p.requires_grad]
    return {
        "parameters": sum(p.numel() for p in held),
        "trainable": sum(p.numel() for p in learn),
        "bytes": sum(p.nbytes for p in held),
        "trainable_bytes": sum(p.nbytes for p in learn),
    }


def lengths(batch: Reasoning) -> dict[str, dict[str, int]]:
    """Median, 90th percentile and longest of each part, in tokens."""
    found: dict[str, dict[str, int]] = {}
    for part in PARTS:
        each = getattr(batch, f"{part}_live").sum(1).double()
        if each.numel():
            found[part] = {
                "p50": int(each.quantile(0.5)),
                "p90": int(each.quantile(0.9)),
                "max": int(each.max()),
            }
    return found


def passes(recipe: Recipe, batch: Reasoning) -> tuple[int, int]:
    """Positions that a row is read at in an update, over all passes, and passes."""
    asked, chain, answer = (getattr(batch, part).shape[1] for part in PARTS)
    how = recipe.thinking
    if how is None:
        return asked + answer + (0 if recipe.method == "nocot" else chain), 1
    M, one_by_one = how.count, how.mode == "sequential"
    think = 1 + M if one_by_one else 1 + M + (how.rounds or 0) * M
    teacher = 0 if recipe.method == "coconut" else chain + answer
    return asked + teacher + think + 1 + answer, 4 + (M if one_by_one else (how.rounds or 0))


def flop(recipe: Recipe, config: DecoderConfig, batch: Reasoning, rows: int) -> float:
    """Of an update: 2 a weight and position forward, as much for gradients of inputs, and of weights that learn."""
    D, F, L, V = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    E, H, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    block = 2 * D * H * E + 2 * D * G * E + (3 if config.gated else 2) * D * F
    positions, _ = passes(recipe, batch)
    scored = batch.answer.shape[1] * (1 if recipe.method == "nocot" else 2) + batch.chain.shape[1]
    times = (3.0 if recipe.train.what == "full" else 2.0) + (1.0 if recipe.train.recompute else 0.0)
    return 2.0 * times * rows * (positions * L * block + scored * D * V)


def counted_memory(recipe: Recipe, config: DecoderConfig, batch: Reasoning, sizes: dict[str, int], micro: int) -> int:
    """Bytes at the peak: what is always there, and what a micro-batch keeps for its backward pass."""
    D, F, L, V = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    E, H, G = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    width = 4 if recipe.train.precision == "float32" else 2
    positions, reads = passes(recipe, batch)
    block = 6 * D + 3 * H * E + 4 * G * E + (4 if config.gated else 2) * F
    if recipe.train.recompute:
        block = (D + 2 * G * E) + (block - D) // max(1, L)
    held = reads * 2 * G * E * batch.question.shape[1]  # each pass joins the question's keys and values to its own
    scored = batch.answer.shape[1] * 2 + batch.chain.shape[1]
    kept = micro * (L * (positions * block + held) * width + 3 * scored * V * 4)
    return sizes["bytes"] + 3 * sizes["trainable_bytes"] + kept


def disk(recipe: Recipe, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes of a step, and of the steps that are kept."""
    model = sizes["bytes"] if recipe.train.what == "full" else sizes["trainable_bytes"]
    step = model + 2 * sizes["trainable_bytes"]
    kept = 2 + recipe.train.keep_best
    return {"step": step, "steps_kept": kept, "kept": kept * step}


def measured(
    recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, source: Source, device: torch.device
) -> tuple[float, int]:
    """Seconds of an update and bytes at its peak, with random weights of these sizes."""
    before = resident()
    decoder = models.drawn(config, device).to(getattr(torch, recipe.model.dtype))
    parts: Parts = models.fresh(recipe, decoder, tokenizer, "")
    method = method_of(parts, recipe, recipe.train.per_epoch(len(source))).to(device).train()
    updating = Updating(method, recipe.train, MEASURED + 1, Alone(), device)
    updating.update(source, place(recipe.train, recipe.seed, 0, len(source)))
    start = time.perf_counter()
    for step in range(1, MEASURED + 1):
        updating.update(source, place(recipe.train, recipe.seed, step, len(source)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - start) / MEASURED
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident() - before
    return seconds, peak


def resident() -> int:
    """Bytes this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def told(found: dict[str, Any]) -> str:
    """A plan for people."""
    each = [f"{part} {v['p50']} / {v['p90']} / {v['max']}" for part, v in found["lengths"].items()]
    memory, seconds, disk_ = found["memory"], found["seconds"], found["disk"]
    lines = [
        f"method       {found['method']}",
        f"parameters   {found['parameters']:,}, of which {found['trainable']:,} learn",
        f"rows         {found['rows']:,}",
        f"steps        {found['steps']:,}, {found['steps_per_epoch']:,} an epoch",
        f"tokens       {'; '.join(each)} (median / 90 % / longest)",
        f"memory       {size(memory['bytes'])} at the peak, {memory['by']}",
        f"time         {duration(seconds['run'])}, {seconds['step']:.3g} s a step, measured" if seconds
        else f"time         not measured: a step is {found['flop_per_step'] / 1e12:,.3g} TFLOP",
        f"disk         {size(disk_['step'])} a save, {disk_['steps_kept']} kept: {size(disk_['kept'])}",
        *found["notes"],
    ]  # fmt: skip
    return "\n".join(lines)


def size(n: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
