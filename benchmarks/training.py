"""Time and memory of a training step, compared with transformers, and with activation checkpointing."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import (
    ABSENT,
    PEERS,
    Scale,
    Table,
    clock,
    clock_name,
    peak_allocated,
    read_resident_peak,
    reset_resident_peak,
    run_python,
    time_interleaved,
    verdict,
)
from benchmarks.models import Pair, load_with_transformers, medium_llama, model_pair, random_ids
from laconic import Decoder

MEBI = 2**20
STEPS = 2  # steps of a child process, so that its peak is not only that of the first step


def batch_of(config: object, scale: Scale) -> tuple[Tensor, Tensor]:
    """Return input ids and next-token targets."""
    ids = random_ids(config, scale.batch, scale.length + 1)  # pyright: ignore[reportArgumentType]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of every position, for a model of either library."""
    if isinstance(model, Decoder):
        return model.logits(model(model.embed(ids)).hidden_states)
    return model(input_ids=ids, use_cache=False).logits


def step(model: nn.Module, ids: Tensor, targets: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward with the same loss for either library and fresh gradients."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(logits_of(model, ids).flatten(0, 1), targets.flatten()).backward()

    return run


def measure_peak(model: nn.Module, work: Callable[[], None]) -> int:
    """Return the peak bytes of a step above the weights, gradients included."""
    model.zero_grad(set_to_none=True)
    return peak_allocated(work)


def training(scale: Scale) -> Table:
    """Return the table of training steps."""
    rows: list[tuple[str, ...]] = []
    for words in dict.fromkeys((scale.small_vocab, scale.vocab)):
        with model_pair(
            f"random Llama {scale.layers} × {scale.width}, V {words:,}", medium_llama(scale, words)
        ) as pair:
            rows += training_rows(pair, scale)
    text = (
        f"One step, forward and backward with cross-entropy over all positions, batch {scale.batch} × {scale.length}, "
        f"float32, train mode, SDPA on both sides, transformers with `use_cache=False`; no optimizer. Time: seconds by "
        f"{clock_name()}, best of {scale.rounds}, rounds interleaved. Memory: the peak above the weights, gradients "
        "included, in MiB, counted by torch's allocator, which is deterministic; and the growth of the resident set "
        "over "
        f"{STEPS} steps in a separate child process, which includes memory that the allocator caches."
    )
    return Table("Training step", text, ("model", "what", "laconic", "transformers", "ratio", "target"), rows)


def training_rows(pair: Pair, scale: Scale) -> list[tuple[str, ...]]:
    """Return the rows of one model: time, allocated memory and resident memory."""
    ids, targets = batch_of(pair.ours.config, scale)
    models = {"ours": pair.ours.train()} | ({"theirs": pair.theirs.train()} if PEERS else {})
    workloads = {side: step(model, ids, targets) for side, model in models.items()}
    times = {side: clock(t) for side, t in time_interleaved(workloads, scale.rounds, 2 * scale.patience).items()}
    mebibytes = {side: measure_peak(models[side], workloads[side]) / MEBI for side in workloads}
    folder = str(pair.ours.source_folder)
    resident_growth: dict[str, float] = {}
    child_sides: list[str] = []
    if pair.ours.config.vocab_size == scale.small_vocab:
        child_sides = list(workloads) if scale.peers_alone else ["ours"]
    for side in child_sides:
        lines = run_python("-m", "benchmarks.training", side, folder, str(scale.batch), str(scale.length))
        resident_growth[side] = lines.json() / MEBI
    rows = (("time, s", times, 2), ("allocated, MiB", mebibytes, 3), ("resident, MiB", resident_growth, 2))
    return [comparison_row(pair.name, what, values, digits) for what, values, digits in rows if values]


def comparison_row(model: str, what: str, values: dict[str, float], digits: int) -> tuple[str, ...]:
    """Return one row; `digits` are those of the ratio."""
    form = "{:.2f}" if what.startswith("time") else "{:.1f}"
    if "theirs" not in values:
        return model, what, form.format(values["ours"]), *[ABSENT] * 3
    ratio = values["ours"] / values["theirs"]
    target = "–" if what.startswith("resident") else verdict(ratio, most=1.0, digits=digits)
    return model, what, form.format(values["ours"]), form.format(values["theirs"]), f"{ratio:.{digits}f}", target


def recompute(scale: Scale) -> Table:
    """Return the table of activation checkpointing."""
    decoder = Decoder(medium_llama(scale, scale.small_vocab)).train()
    ids, targets = batch_of(decoder.config, scale)
    work = step(decoder, ids, targets)

    def with_recompute(k: int) -> Callable[[], None]:
        def run() -> None:
            decoder.activation_checkpointing = k
            work()

        return run

    workloads = {f"activation_checkpointing = {k}": with_recompute(k) for k in (0, 1, 2)}
    times = {name: clock(t) for name, t in time_interleaved(workloads, scale.rounds, scale.patience).items()}
    mebibytes = {name: measure_peak(decoder, way) / MEBI for name, way in workloads.items()}
    rows: list[tuple[str, ...]] = []
    for name in workloads:
        time_ratio, held_ratio = (x[name] / x["activation_checkpointing = 0"] for x in (times, mebibytes))
        has_target = name == "activation_checkpointing = 1"
        rows.append((
            name, f"{times[name]:.2f}", f"{time_ratio:.2f}", verdict(time_ratio, most=1.4) if has_target else "–",
            f"{mebibytes[name]:.0f}", f"{held_ratio:.2f}", verdict(held_ratio, most=0.6) if has_target else "–",
        ))  # fmt: skip
    text = (
        f"The same step of the random Llama {scale.layers} × {scale.width}, V {scale.small_vocab:,}, with every k-th "
        "block checkpointed; ratios to `activation_checkpointing = 0`. Memory as allocated, above the weights, "
        "gradients included."
    )
    head = ("setting", "time, s", "ratio", "target", "allocated, MiB", "ratio", "target")
    return Table("Activation checkpointing", text, head, rows)


def measure_resident_growth(side: str, folder: str, batch: str, length: str) -> int:
    """Return the growth of the resident set over a few steps of one library; run in a separate process."""
    if side == "ours":
        model: nn.Module = Decoder.from_pretrained(folder, dtype=torch.float32).train()
    else:
        model = load_with_transformers(Path(folder)).train()
    work = step(model, *batch_of(model.config, Scale(batch=int(batch), length=int(length))))
    for p in model.parameters():
        p.data.add_(0.0)  # read memory-mapped weights and copy them into this process before measuring
    before = reset_resident_peak()
    for _ in range(STEPS):
        work()
    return read_resident_peak() - before


if __name__ == "__main__":
    print(measure_resident_growth(*sys.argv[1:]))
