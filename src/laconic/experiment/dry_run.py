"""What a run would take, before it is begun: sizes, steps, memory, time and disk; no weight is read."""

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.compression.autocompressor import AutoCompressor
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment import build_model, build_nested
from laconic.experiment.lengths import Foreseen, Lengths, foreseen, pieces
from laconic.experiment.load_run import load_config_and_tokenizer
from laconic.experiment.need import SHARE, counted, need, settled, tracked
from laconic.experiment.need_learning import state_bytes
from laconic.experiment.pace import Pace, flop, pace, reads
from laconic.experiment.sketch import sketched
from laconic.interfaces import Batch
from laconic.models.config import DecoderConfig
from laconic.nested.language_model import NestedLanguageModel

OTHERS = (24, 80)  # GiB of devices that are not at hand


def plan(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Everything `laconic train --plan` tells."""
    config, tokenizer = load_config_and_tokenizer(recipe)
    build_model.check_context_length(recipe, config)
    rows, how = foreseen(recipe, tokenizer, config.max_position_embeddings), recipe.train
    build_nested.check_levels_trainable(recipe, int(rows.lengths.sum(1).max()))
    steps, each = how.total_updates(rows.rows), how.updates_per_epoch(rows.rows)
    method, micro = (
        sketched(recipe, config, tokenizer, each),
        min(how.micro_batch_size or how.batch_size, how.batch_size),
    )
    process = resident()
    row, by = memory(recipe, config, tokenizer, rows, micro, device)
    asked, sizes, room = need(method, row, device), counts(method), free(device)
    fits = {"here": asked.largest(SHARE * room, how.batch_size)}
    fits |= {f"{n} GiB": asked.largest(SHARE * n * 2**30, how.batch_size) for n in OTHERS}
    usual, found = typical(recipe, config, method, rows, micro, device, fits["here"])
    return {
        "schema": 1,
        "method": recipe.method,
        **sizes,
        "rows": rows.rows,
        "assumed": rows.assumed,
        "steps": steps,
        "steps_per_epoch": each,
        "lengths": lengths(rows.lengths, rows.parts),
        "notes": list(rows.notes),
        "flop_per_step": flop(recipe, config, usual, how.batch_size),
        "mixer": {"bytes": asked.peak(micro, how.batch_size), "by": by, "micro": micro, "process": process},
        "largest_micro": {**fits, "free": room},
        "seconds": {"step": found.seconds, "run": found.seconds * steps, "by": found.by},
        "disk": disk(recipe, sizes),
    } | ({"state": state_bytes(method.decoder.hope_config)} if isinstance(method, NestedLanguageModel) else {})


def typical(
    recipe: Recipe,
    config: DecoderConfig,
    method: nn.Module,
    rows: Foreseen,
    micro: int,
    device: torch.device,
    most: int,
) -> tuple[Batch, Pace]:
    """A micro-batch of medium width amid the run, and the mean time of an update over the phases of the run."""
    each, found = recipe.train.updates_per_epoch(rows.rows), pieces(rows.lengths, micro)
    steps = recipe.train.num_updates(each)
    alone = (
        method.head_only_step
        if isinstance(method, AutoCompressor) and method.training_phase(steps - 1) == "head_only"
        else steps
    )
    phases = [(first, last) for first, last in ((0, alone), (alone, steps)) if last > first] or [(0, steps)]
    middles = [(first + last) // 2 for first, last in phases]
    usual = [batch(rows, found, 0.5, step // max(1, each), step) for step in middles]
    paces = [pace(recipe, config, method, one, device, most) for one in usual]
    shares = [(last - first) / max(1, steps) for first, last in phases]
    seconds = sum(share * one.seconds for share, one in zip(shares, paces, strict=True))
    return usual[0], Pace(seconds, paces[0].by + (", and one of the head alone" if len(paces) > 1 else ""))


def batch(rows: Foreseen, found: list[list[int]], rank: float, epoch: int, step: int) -> Batch:
    """A micro-batch of the rows: the widest for rank 1, the narrowest for 0."""
    return rows.source.batch(found[round(rank * (len(found) - 1))], epoch, step)


def memory(
    recipe: Recipe, config: DecoderConfig, tokenizer: Tokenizer, rows: Foreseen, micro: int, device: torch.device
) -> tuple[float, str]:
    """Bytes of a row in the widest micro-batch, at the peak of a pass; and how they were found."""
    found, ends = pieces(rows.lengths, micro), [0]
    if recipe.coconut:  # Coconut has most chain at its beginning, most latents at its end
        ends.append(recipe.coconut.epochs_per_stage * (recipe.coconut.max_stage + 1))
    wide = [batch(rows, found, 1.0, epoch, 0) for epoch in ends]
    if recipe.method == "hope":
        return max(
            counted(recipe, config, reads(recipe, piece)) for one in wide for piece in one.sequential_parts
        ), "by formula"
    try:
        return tracked(recipe, config, tokenizer, wide, device), "followed through fake tensors"
    except Exception as error:  # both tools are private to torch: whatever they raise, there is the formula
        said = f"by formula, since torch's tracker failed: {type(error).__name__}"
        every = [reads(settled(recipe), piece) for one in wide for piece in one.sequential_parts]
        return max(counted(recipe, config, one) for one in every), said


def counts(method: nn.Module) -> dict[str, int]:
    """Parameters in all, those that learn, and the bytes they lie in."""
    held = list(method.parameters())
    learn = [p for p in held if p.requires_grad]
    return {
        "parameters": sum(p.numel() for p in held),
        "trainable": sum(p.numel() for p in learn),
        "bytes": sum(p.nbytes for p in held),
        "trainable_bytes": sum(p.nbytes for p in learn),
    }


def lengths(rows: Lengths, parts: Sequence[str]) -> dict[str, dict[str, int]]:
    """Median, 90th percentile and longest of each part, in tokens."""
    asked = {"p50": 0.5, "p90": 0.9, "max": 1.0}
    columns = [torch.as_tensor(rows[:, i]).double() for i in range(len(parts))]
    return {
        part: {name: int(column.quantile(q)) for name, q in asked.items()}
        for part, column in zip(parts, columns, strict=True)
    }


def free(device: torch.device) -> int:
    """Bytes that a process may still take there: of a CPU what the system, its container and the shell leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    text = read(Path("/proc/meminfo"))
    found += [1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("MemAvailable:")]
    bound, used = (read(Path("/sys/fs/cgroup") / name).strip() for name in ("mixer.max", "mixer.current"))
    if bound.isdecimal() and used.isdecimal():
        found.append(int(bound) - int(used))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(found if limit == resource.RLIM_INFINITY else [*found, limit])


def read(path: Path) -> str:
    """A text of the system, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""


def resident() -> int:
    """Bytes this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def disk(recipe: Recipe, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of a step, and of the steps that are kept."""
    model = sizes["bytes"] if recipe.train.trainable == "full" else sizes["trainable_bytes"]
    step = model + 2 * sizes["trainable_bytes"]
    kept = 2 + recipe.train.keep_best
    return {"step": step, "steps_kept": kept, "kept": kept * step}


def told(found: Mapping[str, Any]) -> str:
    """A plan for people."""
    each = [f"{part} {v['p50']} / {v['p90']} / {v['max']}" for part, v in found["lengths"].items()]
    memory, seconds, disk_, fits = found["memory"], found["seconds"], found["disk"], found["largest_micro"]
    others = ", ".join(f"{n} in {place}" for place, n in fits.items() if place not in ("here", "free"))
    assumed = ", assumed" if found["assumed"] else ""
    lines = [
        f"method       {found['method']}",
        f"parameters   {found['parameters']:,}, of which {found['trainable']:,} learn",
        f"rows         {found['rows']:,}{assumed}",
        f"steps        {found['steps']:,}, {found['steps_per_epoch']:,} an epoch",
        f"tokens       {'; '.join(each)} (median / 90 % / longest{assumed})",
        f"memory       {size(memory['bytes'])} at the peak of micro-batches of {memory['micro']}, {memory['by']}; "
        f"the process itself {size(memory['process'])}",
        f"micro-batch  {fits['here']} rows fit the {size(fits['free'])} free here; {others}",
        f"time         {duration(seconds['run'])}, {seconds['step']:.3g} s a step, by {seconds['by']}",
        f"disk         {size(disk_['step'])} a save, {disk_['steps_kept']} kept: {size(disk_['kept'])}",
        *([f"state        {size(found['state'])} a sequence, all levels full"] if "state" in found else []),
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
    if seconds < 172800:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.0f} days"
