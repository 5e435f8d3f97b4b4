"""One training step, forward and backward: time and memory beside transformers, and with recomputation."""

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
    child,
    clock,
    clock_name,
    peak_allocated,
    race,
    resident,
    resident_peak,
    verdict,
)
from benchmarks.models import Pair, middling, pair, peer, random_ids
from laconic import Decoder

MEBI = 2**20
STEPS = 2  # of a child, whose peak is then that of a run and not of its first step


def batch_of(config: object, scale: Scale) -> tuple[Tensor, Tensor]:
    """Ids, and the ids that follow them."""
    ids = random_ids(config, scale.batch, scale.length + 1)  # pyright: ignore[reportArgumentType]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits at every position, from either side's model."""
    if isinstance(model, Decoder):
        return model.logits(model(model.embed(ids)).hidden_states)
    return model(input_ids=ids, use_cache=False).logits


def step(model: nn.Module, ids: Tensor, targets: Tensor) -> Callable[[], None]:
    """Forward and backward with the same loss on either side; gradients are made anew each time."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        F.cross_entropy(logits_of(model, ids).flatten(0, 1), targets.flatten()).backward()

    return run


def memory(model: nn.Module, work: Callable[[], None]) -> int:
    """Peak bytes of a step above the weights, gradients included."""
    model.zero_grad(set_to_none=True)
    return peak_allocated(work)


def training(scale: Scale) -> Table:
    """The table of training steps."""
    rows: list[tuple[str, ...]] = []
    for words in dict.fromkeys((scale.few_words, scale.words)):
        with pair(f"random Llama {scale.layers} × {scale.width}, V {words:,}", middling(scale, words)) as models:
            rows += training_rows(models, scale)
    text = (
        f"One step, forward and backward with cross-entropy over all positions, batch {scale.batch} × {scale.length}, "
        f"float32, train mode, SDPA on both sides, transformers with `use_cache=False`; no optimizer. Time: seconds by "
        f"{clock_name()}, best of {scale.rounds}, rounds interleaved. Memory: the peak above the weights, gradients "
        "included, in MiB, counted from torch's allocator (every allocation of a tensor, which does not depend on the "
        f"machine's mood); beside it the growth of the resident set over {STEPS} steps in a child process of its own, "
        "which holds what the allocator keeps back, too."
    )
    return Table("Training step", text, ("model", "what", "laconic", "transformers", "ratio", "target"), rows)


def training_rows(pair: Pair, scale: Scale) -> list[tuple[str, ...]]:
    """Time, counted memory and resident memory of one model."""
    ids, targets = batch_of(pair.ours.config, scale)
    models = {"ours": pair.ours.train()} | ({"theirs": pair.theirs.train()} if PEERS else {})
    ways = {side: step(model, ids, targets) for side, model in models.items()}
    times = {side: clock(t) for side, t in race(ways, scale.rounds, 2 * scale.patience).items()}
    memories = {side: memory(models[side], ways[side]) / MEBI for side in ways}
    folder = str(pair.ours.source_folder)
    grown: dict[str, float] = {}
    alone = [] if pair.ours.config.vocab_size != scale.few_words else list(ways) if scale.peers_alone else ["ours"]
    for side in alone:
        lines = child("-m", "benchmarks.training", side, folder, str(scale.batch), str(scale.length))
        grown[side] = lines.json() / MEBI
    rows = (("time, s", times, 2), ("allocated, MiB", memories, 3), ("resident, MiB", grown, 2))
    return [compared(pair.name, what, values, digits) for what, values, digits in rows if values]


def compared(model: str, what: str, values: dict[str, float], digits: int) -> tuple[str, ...]:
    """One line of the table; `digits` of the ratio."""
    form = "{:.2f}" if what.startswith("time") else "{:.1f}"
    if "theirs" not in values:
        return model, what, form.format(values["ours"]), *[ABSENT] * 3
    ratio = values["ours"] / values["theirs"]
    target = "–" if what.startswith("resident") else verdict(ratio, most=1.0, digits=digits)
    return model, what, form.format(values["ours"]), form.format(values["theirs"]), f"{ratio:.{digits}f}", target


def recompute(scale: Scale) -> Table:
    """The table of recomputation."""
    decoder = Decoder(middling(scale, scale.few_words)).train()
    ids, targets = batch_of(decoder.config, scale)
    work = step(decoder, ids, targets)

    def with_recompute(k: int) -> Callable[[], None]:
        def run() -> None:
            decoder.activation_checkpointing = k
            work()

        return run

    ways = {f"recompute = {k}": with_recompute(k) for k in (0, 1, 2)}
    times = {name: clock(t) for name, t in race(ways, scale.rounds, scale.patience).items()}
    memories = {name: memory(decoder, way) / MEBI for name, way in ways.items()}
    rows: list[tuple[str, ...]] = []
    for name in ways:
        time_ratio, held_ratio = (x[name] / x["recompute = 0"] for x in (times, memories))
        judged = name == "recompute = 1"
        rows.append((
            name, f"{times[name]:.2f}", f"{time_ratio:.2f}", verdict(time_ratio, most=1.4) if judged else "–",
            f"{memories[name]:.0f}", f"{held_ratio:.2f}", verdict(held_ratio, most=0.6) if judged else "–",
        ))  # fmt: skip
    text = (
        f"The same step of the random Llama {scale.layers} × {scale.width}, V {scale.few_words:,}, with every k-th "
        "block checkpointed; ratios to `recompute = 0`. Memory as allocated, above the weights, gradients included."
    )
    head = ("setting", "time, s", "ratio", "target", "allocated, MiB", "ratio", "target")
    return Table("Recomputation", text, head, rows)


def growth(side: str, folder: str, batch: str, length: str) -> int:
    """Growth of the resident set over a few steps of one side, in a process of its own."""
    if side == "ours":
        model: nn.Module = Decoder.from_pretrained(folder, dtype=torch.float32).train()
    else:
        model = peer(Path(folder)).train()
    work = step(model, *batch_of(model.config, Scale(batch=int(batch), length=int(length))))
    for p in model.parameters():
        p.data.add_(0.0)  # a mapped weight is read, and made this process's own, before the count begins
    before = resident()
    for _ in range(STEPS):
        work()
    return resident_peak() - before


if __name__ == "__main__":
    print(growth(*sys.argv[1:]))
