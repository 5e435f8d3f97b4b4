"""Estimate memory and time of a run for `laconic train --plan`: one update on the meta device, without any weight.

Bytes saved for the backward pass are collected by `saved_tensors_hooks`, FLOPs by `FlopCounterMode`. Both are linear in
the number of layers, so one and two layers are run and extrapolated.
"""

import os
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from laconic.config.recipe import Recipe
from laconic.console import format_duration, pluralize
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.from_recipe import build_model, build_nested
from laconic.experiment.from_recipe.build import build_experiment, build_optimizer
from laconic.experiment.from_recipe.build_data import check_validation
from laconic.experiment.from_recipe.cost import format_bytes
from laconic.experiment.from_recipe.meta_model import (
    build_meta_method,
    count_checkpointed_parts,
    with_num_layers,
    without_checkpointing,
)
from laconic.experiment.from_recipe.row_lengths import find_row_lengths, make_blank_batch, make_micro_batches
from laconic.experiment.load_run import load_config_and_tokenizer
from laconic.interfaces import Batch
from laconic.models.config import DecoderConfig
from laconic.training.ranks import Ranks
from laconic.training.row_order import compute_update_index
from laconic.training.step import PRECISION_DTYPES, Updater, check_output, get_loss_denominators

GIB = 2**30
OTHER_DEVICES = (24, 80)  # GiB
USABLE_FRACTION = 0.95  # of the free memory
ALLOCATOR_OVERHEAD = {"cpu": 1.2, "cuda": 1.0}
MATMUL_ROWS, MATMUL_SECONDS = 512, 0.2


class FusedAttention(torch.autograd.Function):
    """Attention that saves no attention weights, as in the fused kernels; the meta device has none."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Return the output of attention; keep inputs and output for the backward pass."""
        output = F.scaled_dot_product_attention(q, k, v, mask, **options)
        ctx.save_for_backward(q, k, v, mask, output)
        ctx.options = options
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients; attention is computed again, as the fused kernels do."""
        *inputs, mask, _ = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in inputs]
            output = F.scaled_dot_product_attention(*inputs, mask, **ctx.options)
            return (*torch.autograd.grad(output, inputs, gradients), None, None)


class MetaMode(TorchFunctionMode):
    """Run code with float tensors on the meta device and integer tensors on the CPU, as if all were on the CPU.

    Masks and positions keep their values, so that code may branch on them; other branches see zeros. Inner gradients
    are left out where a backward pass would recompute activations, since function modes are off there.
    """

    def __init__(self, *, has_inner_gradients: bool, has_fused_attention: bool) -> None:
        super().__init__()
        self.has_inner_gradients, self.has_fused_attention = has_inner_gradients, has_fused_attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is torch.autograd.grad and not self.has_inner_gradients:
            return tuple(torch.empty_like(x) for x in args[1])
        if isinstance(first, Tensor) and first.is_meta:
            if func == Tensor.device.__get__:  # type: ignore[attr-defined]
                return torch.device("cpu")
            if func is Tensor.cpu:
                return first
            if func in (Tensor.item, Tensor.__float__, Tensor.__bool__, Tensor.tolist):
                return func(torch.zeros(first.shape))
            dtype, name = kwargs.get("dtype"), getattr(func, "__name__", "")
            if dtype is not None and not dtype.is_floating_point and (name[:4] == "new_" or name[-5:] == "_like"):
                kwargs = {**kwargs, "device": "cpu"}
        if len({x.is_meta for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}) == 2:
            args, kwargs = tree_map_only(Tensor, lambda x: x if x.is_meta else x.to("meta"), (args, kwargs))
        if func is F.scaled_dot_product_attention and self.has_fused_attention:
            options = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)), **kwargs}
            mask = options.pop("attn_mask", None)
            if mask is None or not mask.requires_grad:
                return FusedAttention.apply(*args[:3], mask, options)
        return func(*args, **kwargs)


class UpdateCost(NamedTuple):
    """Bytes kept for the backward pass of a batch, and FLOPs of forward and backward."""

    saved_bytes: float
    flops: float


def run_backward(loss: Tensor) -> None:
    """Call the autograd engine itself; `torch.autograd.backward` turns function modes off, also for recomputed rows."""
    engine = cast(Any, torch.autograd.Variable)._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def measure_on_meta(
    recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, batch: Batch, *, has_backward: bool = True
) -> UpdateCost:
    """Run forward and, unless layers are recomputed in it (function modes are off there), backward of a batch."""
    method = cast(Any, build_meta_method(recipe, config, tokenizer))
    model_storages = {id(x.untyped_storage()) for x in (*method.parameters(), *method.buffers())}
    whole: Any = replace(cast(Any, batch), loss_denominators=get_loss_denominators(method, batch))
    most, state = 0, None
    mode = MetaMode(has_inner_gradients=has_backward, has_fused_attention=recipe.method != "hope")
    with FlopCounterMode(display=False) as counter, mode:
        for part in whole.sequential_parts:
            saved: dict[int, Any] = {}

            def pack(x: Tensor, saved: dict[int, Any] = saved) -> Tensor:
                if x.is_floating_point() and x.is_meta and id(x.untyped_storage()) not in model_storages:
                    saved[id(x.untyped_storage())] = x.untyped_storage()
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                output = check_output(method, method(part) if state is None else method(part, state))
            sizes = [storage.nbytes() for storage in saved.values()]
            most = max(most, sum(sizes) + 2 * max(sizes, default=0))  # a gradient and a copy of the largest tensor
            if has_backward:
                run_backward(output.loss)
            state = None if output.state is None else output.state.detach()
    return UpdateCost(most, counter.get_total_flops())


def estimate_update(recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, batch: Batch) -> UpdateCost:
    """Estimate the cost of a batch; with activation checkpointing, one part at a time has all its activations."""
    unit = recipe.train.activation_checkpointing or 1  # layers that are recomputed together

    def extrapolate(recipe: Recipe, *, has_backward: bool) -> UpdateCost:
        """Extrapolate from models of one and two units of layers."""
        if config.num_hidden_layers <= 2 * unit:
            return measure_on_meta(recipe, config, tokenizer, batch, has_backward=has_backward)
        sizes = [with_num_layers(recipe, config, n * unit) for n in (1, 2)]
        one, two = (measure_on_meta(*size, tokenizer, batch, has_backward=has_backward) for size in sizes)
        more = config.num_hidden_layers / unit - 1
        return UpdateCost(*(a + more * (b - a) for a, b in zip(one, two, strict=True)))

    parts = count_checkpointed_parts(recipe, config, batch)
    plain = extrapolate(without_checkpointing(recipe), has_backward=True)
    if parts is None:
        return plain
    forward = extrapolate(recipe, has_backward=False).saved_bytes
    return UpdateCost(min(plain.saved_bytes, forward + plain.saved_bytes / parts), plain.flops * 4 / 3)


class MemoryModel(NamedTuple):
    """Bytes of weights and optimizer state, of gradients, and of a row's activations."""

    fixed: int
    gradients: int
    per_row: float
    overhead: float

    def peak(self, micro_batch_size: int, batch_size: int) -> int:
        """Return the peak of an update; between micro-batches the gradients are kept."""
        waiting = self.gradients if micro_batch_size < batch_size else 0
        return round(self.overhead * (self.fixed + max(waiting + micro_batch_size * self.per_row, 2 * self.gradients)))

    def largest_micro_batch(self, room: float, batch_size: int) -> int:
        """Return the largest micro-batch that fits into `room` bytes, or 0."""
        return next((n for n in range(batch_size, 0, -1) if self.peak(n, batch_size) <= room), 0)


def plan_run(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return parameters, rows, updates, memory, time and disk space of a run; no weight is read."""
    config, tokenizer = load_config_and_tokenizer(recipe)
    build_model.check_context_length(recipe, config)
    context, train = config.max_position_embeddings, recipe.train
    rows = find_row_lengths(recipe, tokenizer, context)
    notes = (*rows.notes, *check_validation(recipe, tokenizer, config))
    build_nested.check_levels_trainable(recipe, int(rows.lengths.sum(1).max()))
    steps, per_epoch = train.total_updates(rows.num_rows), train.updates_per_epoch(rows.num_rows)
    micro = train.micro_batch_size or train.batch_size
    batches = make_micro_batches(rows.lengths, micro)
    epochs = [0]
    if recipe.method == "coconut" and recipe.coconut is not None:  # also the last stage, which has the most latents
        epochs.append(recipe.coconut.epochs_per_stage * (recipe.coconut.max_stage + 1))
    wide = [make_blank_batch(recipe, rows, batches[-1], context, epoch, 0) for epoch in epochs]
    costs = [estimate_update(recipe, config, tokenizer, batch) for batch in wide]
    per_row = max(cost.saved_bytes for cost in costs) / micro
    median = batches[len(batches) // 2]
    if recipe.method != "hope" or (rows.lengths[median] != rows.lengths[batches[-1]]).any():
        epoch, step = steps // 2 // max(1, per_epoch), steps // 2
        median_batch = make_blank_batch(recipe, rows, median, context, epoch, step)
        costs.append(estimate_update(recipe, config, tokenizer, median_batch))
    flops = costs[-1].flops * train.batch_size / micro
    method = build_meta_method(recipe, config, tokenizer)
    trainable = [p for p in method.parameters() if p.requires_grad]
    counts = {
        "parameters": sum(p.numel() for p in method.parameters()), "trainable": sum(p.numel() for p in trainable),
        "bytes": sum(p.nbytes for p in method.parameters()), "trainable_bytes": sum(p.nbytes for p in trainable),
    }  # fmt: skip
    memory = MemoryModel(
        counts["bytes"] + 2 * counts["trainable_bytes"], counts["trainable_bytes"], per_row,
        ALLOCATOR_OVERHEAD.get(device.type, 1.0),
    )  # fmt: skip
    free = free_memory(device)
    fits = {"here": memory.largest_micro_batch(USABLE_FRACTION * free, train.batch_size)}
    fits |= {f"{n} GiB": memory.largest_micro_batch(USABLE_FRACTION * n * GIB, train.batch_size) for n in OTHER_DEVICES}
    seconds = flops / measure_matmul(recipe, config, device)
    step_bytes = counts["trainable_bytes" if train.trainable != "full" else "bytes"] + 2 * counts["trainable_bytes"]
    retained = 2 + train.keep_best
    quantiles = np.quantile(rows.lengths, (0.5, 0.9, 1.0), axis=0).astype(int).T.tolist()
    lengths = [dict(zip(("p50", "p90", "max"), values, strict=True)) for values in quantiles]
    return {
        "schema": 2, "method": recipe.method, **counts, "rows": rows.num_rows, "assumed": rows.is_assumed,
        "steps": steps, "steps_per_epoch": per_epoch,
        "tokens": dict(zip(rows.parts(), lengths, strict=True)),
        "notes": list(notes), "flops_per_step": flops, "threads": torch.get_num_threads(),
        "memory": {"bytes": memory.peak(micro, train.batch_size), "micro_batch_size": micro},
        "largest_micro_batch": {**fits, "free": free}, "seconds": {"step": seconds, "run": seconds * steps},
        "disk": {"step": step_bytes, "steps_kept": retained, "kept": retained * step_bytes},
    }  # fmt: skip


def plan_with_step(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Return the plan, with time and peak memory of one real update. The weights are read; nothing is written."""
    plan = plan_run(recipe, device)
    experiment = build_experiment(recipe, device)
    updater = Updater(experiment.method, recipe.train, plan["steps"], Ranks(), device, build_optimizer)
    rows = len(cast(Any, experiment.training_data))
    start = time.perf_counter()
    updater.update(experiment.training_data, compute_update_index(recipe.train, recipe.seed, 0, rows))
    synchronize(device)
    seconds = time.perf_counter() - start
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident
    return plan | {"measured": {"seconds": seconds, "bytes": peak}}


def measure_matmul(recipe: Recipe, config: DecoderConfig, device: torch.device) -> float:
    """Return the FLOPs per second of a matrix product with the model's sizes."""
    dtype, D, F = PRECISION_DTYPES[recipe.train.precision], config.hidden_size, config.intermediate_size
    x, w = (torch.ones(n, m, dtype=dtype, device=device) for n, m in ((MATMUL_ROWS, D), (D, F)))
    torch.mm(x, w)
    synchronize(device)
    start, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - start < MATMUL_SECONDS:
        torch.mm(x, w)
        synchronize(device)
        done += 1
    return 2.0 * MATMUL_ROWS * D * F * done / (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    others = [f"{n} on one of {place}" for place, n in fits.items() if place not in ("here", "free")]
    places = ", ".join([f"{fits['here']} rows on this device ({format_bytes(fits['free'])} free)", *others])
    assumed = ", assumed" if plan["assumed"] else ""
    lines = [
        f"method       {plan['method']}",
        f"parameters   {plan['parameters']:,}, {plan['trainable']:,} trainable",
        f"rows         {plan['rows']:,}{assumed}",
        f"updates      {plan['steps']:,}; an epoch has {plan['steps_per_epoch']:,}",
        f"tokens       {'; '.join(parts)} (median / 90 % / longest{assumed})",
        f"memory       {format_bytes(memory['bytes'])} at the peak, micro-batches of {memory['micro_batch_size']} rows",
        f"fits         micro-batches of up to {places}",
        f"time         {format_duration(seconds['run'])}, {seconds['step']:.3g} s per update, from "
        f"{plan['flops_per_step']:.3g} FLOPs and a measured matrix product; {pluralize(plan['threads'], 'thread')}",
        f"disk         {format_bytes(disk['step'])} per checkpoint, {disk['steps_kept']} of them: "
        f"{format_bytes(disk['kept'])}",
    ]
    if "measured" in plan:
        seconds, peak = plan["measured"]["seconds"], format_bytes(plan["measured"]["bytes"])
        lines.append(f"measured     one update: {seconds:.3g} s, {peak} at the peak of the process")
    return "\n".join([*lines, *plan["notes"]])
