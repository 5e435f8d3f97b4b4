"""Plan a run for `laconic train --plan`: rows, updates, memory, time and disk space, without reading any weight."""

import os
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from laconic.config.recipe import Recipe
from laconic.console import format_duration, pluralize
from laconic.experiment.from_recipe import build_model, build_nested
from laconic.experiment.from_recipe.build import build_experiment, build_optimizer
from laconic.experiment.from_recipe.build_data import check_validation
from laconic.experiment.from_recipe.cost import format_bytes
from laconic.experiment.from_recipe.fake_update import UpdateCost, estimate_update
from laconic.experiment.from_recipe.methods import build_meta_method
from laconic.experiment.from_recipe.sample_rows import count_row_tokens, sample_training_rows
from laconic.experiment.load_run import load_config_and_tokenizer
from laconic.models.config import DecoderConfig
from laconic.training.random_state import get_random_state
from laconic.training.ranks import Ranks
from laconic.training.row_order import compute_update_index
from laconic.training.step import PRECISION_DTYPES, Updater

GIB = 2**30
OTHER_DEVICES = (24, 80)  # GiB
USABLE_FRACTION = 0.95  # of the free memory
ALLOCATOR_OVERHEAD = {"cpu": 1.2, "cuda": 1.0}
MATMUL_ROWS, MATMUL_SECONDS = 512, 0.2
QUANTILES = {"p50": 0.5, "p90": 0.9, "max": 1.0}  # of lengths


class MemoryModel(NamedTuple):
    """Bytes of weights and optimizer state, gradients, copies in an optimizer step, and a row's activations."""

    fixed: int
    gradients: int
    copies: int
    per_row: float
    overhead: float

    def peak(self, micro_batch_size: int, batch_size: int) -> int:
        """Return the peak of an update; between micro-batches the gradients are kept."""
        waiting = self.gradients if micro_batch_size < batch_size else 0
        rows = waiting + micro_batch_size * self.per_row
        return round(self.overhead * (self.fixed + max(rows, self.gradients + self.copies)))

    def largest_micro_batch(self, room: float, batch_size: int) -> int:
        """Return the largest micro-batch that fits into `room` bytes, or 0."""
        return next((n for n in range(batch_size, 0, -1) if self.peak(n, batch_size) <= room), 0)


def plan_run(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return parameters, rows, updates, memory, time and disk space of a run; no weight is read."""
    config, tokenizer = load_config_and_tokenizer(recipe)
    build_model.check_context_length(recipe, config)
    train = recipe.train
    sample = sample_training_rows(recipe, tokenizer, config.max_position_embeddings)
    notes = (*sample.notes, *check_validation(recipe, tokenizer, config))
    micro = train.micro_batch_size or train.batch_size
    tokens = count_row_tokens(sample.source)
    lengths = np.stack(list(tokens.values())).sum(0)
    longest = np.resize(lengths.argsort()[-micro:], micro)  # rows, the same several times if there are fewer
    build_nested.check_levels_trainable(recipe, int(lengths.max()))
    steps, per_epoch = train.total_updates(sample.num_rows), train.updates_per_epoch(sample.num_rows)
    middle, last = (step // max(1, per_epoch) for step in (steps // 2, steps - 1))
    epochs = {0, middle, last} if recipe.method in ("coconut", "icot") else {middle}  # these have stages
    costs: dict[int, UpdateCost] | None = None
    try:
        batches = {epoch: sample.source.batch(longest.tolist(), epoch, steps // 2) for epoch in epochs}
        costs = {epoch: estimate_update(recipe, config, tokenizer, batch) for epoch, batch in batches.items()}
    except RuntimeError as error:  # of torch, for a shape that depends on numbers
        if not recipe.is_custom_method:
            raise
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        notes += (f"memory and time need the numbers of {recipe.method} ({problem}); --plan=step measures them",)
    method = build_meta_method(recipe, config, tokenizer)
    trainable = [p for p in method.parameters() if p.requires_grad]
    counts = {
        "parameters": sum(p.numel() for p in method.parameters()), "trainable": sum(p.numel() for p in trainable),
        "bytes": sum(p.nbytes for p in method.parameters()), "trainable_bytes": sum(p.nbytes for p in trainable),
    }  # fmt: skip
    notes += note_stored_dtype(recipe, config, counts["bytes"] - counts["trainable_bytes"])
    estimates: dict[str, Any] = dict.fromkeys(("flops_per_step", "memory", "largest_micro_batch", "seconds"))
    if costs is not None:
        flops = costs[middle].flops * lengths.mean() / lengths[longest].mean() * train.batch_size / micro
        is_foreach = device.type != "cpu" or train.optimizer != "adamw"  # AdamW on a CPU updates one tensor at a time
        copies = counts["trainable_bytes"] if is_foreach else 2 * max(p.nbytes for p in trainable)
        memory = MemoryModel(
            counts["bytes"] + 2 * counts["trainable_bytes"], counts["trainable_bytes"], copies,
            max(cost.peak_bytes for cost in costs.values()) / micro, ALLOCATOR_OVERHEAD.get(device.type, 1.0),
        )  # fmt: skip
        free = free_memory(device)
        seconds = flops / measure_matmul(recipe, config, device)
        room = {"here": free} | {f"{n} GiB": n * GIB for n in OTHER_DEVICES}
        fits = {place: memory.largest_micro_batch(USABLE_FRACTION * n, train.batch_size) for place, n in room.items()}
        estimates = {
            "flops_per_step": flops,
            "memory": {"bytes": memory.peak(micro, train.batch_size), "micro_batch_size": micro},
            "largest_micro_batch": {**fits, "free": free}, "seconds": {"step": seconds, "run": seconds * steps},
        }  # fmt: skip
    step_bytes = counts["trainable_bytes" if train.trainable != "full" else "bytes"] + 2 * counts["trainable_bytes"]
    retained = 2 + train.keep_best
    return {
        "schema": 2, "method": recipe.method, **counts, "rows": sample.num_rows, "assumed": sample.is_assumed,
        "steps": steps, "steps_per_epoch": per_epoch,
        "tokens": {
            part: {name: int(np.quantile(counts, at)) for name, at in QUANTILES.items()}
            for part, counts in tokens.items()
        },
        "notes": list(notes), "threads": torch.get_num_threads(), **estimates,
        "disk": {"step": step_bytes, "steps_kept": retained, "kept": retained * step_bytes},
    }  # fmt: skip


def note_stored_dtype(recipe: Recipe, config: DecoderConfig, frozen_bytes: int) -> tuple[str, ...]:
    stored, is_frozen = str(config.dtype).removeprefix("torch."), recipe.train.trainable == "lora"
    if recipe.train.trainable == "full" and recipe.model.dtype != "float32":
        return (f'model.dtype={recipe.model.dtype}: small updates round to nothing; "float32" keeps them',)
    if not is_frozen or recipe.model.dtype != "float32" or recipe.model.init_from_run or config.dtype.itemsize != 2:
        return ()
    saved = format_bytes(frozen_bytes / 2)
    return (f"model.dtype={stored} keeps the frozen weights as they are stored, which takes {saved} less",)


def plan_with_step(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return the plan, with time and peak memory of one real update. The weights are read; nothing is written."""
    plan = plan_run(recipe, device)
    experiment = build_experiment(recipe, device)
    updater = Updater(experiment.method, recipe.train, plan["steps"], Ranks(), device, build_optimizer)
    index = compute_update_index(recipe.train, recipe.seed, 0, len(experiment.training_data))
    start = time.perf_counter()
    updater.update(experiment.training_data, index, get_random_state())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident
    return plan | {"measured": {"seconds": seconds, "bytes": peak}}


def measure_matmul(recipe: Recipe, config: DecoderConfig, device: torch.device) -> float:
    """Return the FLOPs per second of a matrix product with the model's sizes, in the dtype of an update."""
    precision = recipe.train.precision
    dtype = getattr(torch, recipe.model.dtype) if precision == "float32" else PRECISION_DTYPES[precision]
    D = config.hidden_size
    F = config.intermediate_size
    x, w = (torch.ones(n, m, dtype=dtype, device=device) for n, m in ((MATMUL_ROWS, D), (D, F)))
    torch.mm(x, w)[0, 0].item()  # which waits for the device
    start = time.perf_counter()
    done = 0
    while done == 0 or time.perf_counter() - start < MATMUL_SECONDS:
        torch.mm(x, w)[0, 0].item()
        done += 1
    return 2.0 * MATMUL_ROWS * D * F * done / (time.perf_counter() - start)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of the system within the limits of container and shell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), resource.getrlimit(resource.RLIMIT_AS)[0]]
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # the limit of a group without one is "max"
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        limits.append(limit - used)
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)


def format_plan(plan: Mapping[str, Any]) -> str:
    parts = [f"{part} {v['p50']} / {v['p90']} / {v['max']}" for part, v in plan["tokens"].items()]
    memory, seconds, disk, fits = plan["memory"], plan["seconds"], plan["disk"], plan["largest_micro_batch"]
    assumed = ", assumed" if plan["assumed"] else ""
    lines = [
        f"method       {plan['method']}",
        f"parameters   {plan['parameters']:,}, {plan['trainable']:,} trainable",
        f"rows         {plan['rows']:,}{assumed}",
        f"updates      {plan['steps']:,}; an epoch has {plan['steps_per_epoch']:,}",
        f"tokens       {'; '.join(parts)} (median / 90 % / longest{assumed})",
    ]
    if memory is not None:
        others = [f"{n} on one of {place}" for place, n in fits.items() if place not in ("here", "free")]
        places = ", ".join([f"{fits['here']} rows on this device ({format_bytes(fits['free'])} free)", *others])
        lines += [
            f"memory       {format_bytes(memory['bytes'])} at the peak, micro-batches of "
            f"{memory['micro_batch_size']} rows",
            f"fits         micro-batches of up to {places} (at most train.batch_size)",
            f"time         {format_duration(seconds['run'])}, {seconds['step']:.3g} s per update, from "
            f"{plan['flops_per_step']:.3g} FLOPs and a measured matrix product; {pluralize(plan['threads'], 'thread')}",
        ]
    lines.append(
        f"disk         {format_bytes(disk['step'])} per checkpoint, {disk['steps_kept']} of them: "
        f"{format_bytes(disk['kept'])}"
    )
    if "measured" in plan:
        seconds = plan["measured"]["seconds"]
        peak = format_bytes(plan["measured"]["bytes"])
        lines.append(f"measured     one update: {seconds:.3g} s, {peak} at the peak of the process")
    return "\n".join([*lines, *plan["notes"]])
