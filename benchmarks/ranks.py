"""Memory of updates on one process and on several ranks, with DDP and FSDP2."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp  # pyright: ignore[reportUnusedImport]  # counted before the model

from benchmarks.measure import Scale, Table, read_resident_peak, reset_resident_peak, run_python
from benchmarks.models import llama, num_parameters
from laconic import Decoder
from laconic.batches import DocumentBatch
from laconic.compression.lm_baseline import LanguageModelBaseline
from laconic.config.training import TrainingConfig
from laconic.training.distributed import init_ranks
from laconic.training.random_state import get_random_state
from laconic.training.row_order import UpdateIndex
from laconic.training.step import Updater

MEGA = 10**6
UPDATES = 2  # AdamW's moments exist after the first
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # else glibc keeps what was freed, more than the model's size
ROWS = 4  # of an update, over all ranks; one in each micro-batch
SETTINGS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "fsdp, reshard": {"parallel": "fsdp", "reshard": True},
}


class RankUsage(NamedTuple):
    """Bytes of a rank while the model was built, during updates and between them."""

    build: int
    peak: int
    resident: int


class RandomRows:
    """Rows of random tokens."""

    fingerprint = ""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size, self.length = vocab_size, length

    def __len__(self) -> int:
        return ROWS

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """Return rows as one segment each."""
        shape = len(rows), self.length
        ids = torch.randint(self.vocab_size, shape, generator=torch.Generator().manual_seed(step))
        mask = torch.ones(shape, dtype=torch.bool)
        return DocumentBatch(ids, mask, mask, (self.length,), torch.tensor(rows), step=step)


def ranks(scale: Scale) -> Table:
    """Return the table of ranks."""
    rows: list[tuple[str, ...]] = []
    worlds = (1, 2, 4) if scale.width > 32 else (1, 2)
    sizes = [str(n) for n in (3 * scale.layers, scale.width, scale.small_vocab, min(64, scale.length))]
    for name in SETTINGS:
        for world in worlds:
            if (world == 1) != (name == "one process"):
                continue
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
            command = [*(launcher if world > 1 else []), "-m", "benchmarks.ranks", name, *sizes]
            usage = RankUsage(*run_python(*command, threads=1, variables=MALLOC).json())
            rows.append((name, str(world), *(f"{value / MEGA:,.0f}" for value in usage)))
    parameters = num_parameters(build_decoder(*map(int, sizes[:3]))) / MEGA
    text = (
        f"Resident memory of a rank in MB, above what the process used before it built the model: AdamW in float32 on "
        f"a random Llama of {parameters:.0f} M parameters ({4 * parameters:,.0f} MB), {sizes[0]} layers of width "
        f"{sizes[1]}; updates of {ROWS} rows of {sizes[3]} tokens, one row in each micro-batch; gloo, one thread for "
        "each rank, `MALLOC_MMAP_THRESHOLD_=65536`. The largest rank, while it builds and wraps the model, at the peak "
        f"of {UPDATES} updates, and after them."
    )
    return Table("Ranks", text, ("parallel", "ranks", "build", "peak", "after"), rows)


def build_decoder(layers: int, width: int, vocab: int) -> Decoder:
    """Return a random Llama with heads of 64."""
    heads = max(2, width // 64)
    return Decoder(llama(layers, width, vocab, heads=heads, groups=heads, mlp_size=width * 8 // 3))


def measure_rank(name: str, layers: int, width: int, vocab: int, length: int) -> RankUsage:
    """Train on this rank; return the usage of the largest."""
    config = TrainingConfig(steps=UPDATES, batch_size=ROWS, micro_batch_size=1, **SETTINGS[name])
    with init_ranks(config, torch.device("cpu")) as group:
        before = reset_resident_peak()
        method = LanguageModelBaseline(build_decoder(layers, width, vocab)).train()
        updater = Updater(method, config, UPDATES, group, torch.device("cpu"))
        build = read_resident_peak() - before
        reset_resident_peak()
        data = RandomRows(vocab, length)
        for step in range(UPDATES):
            updater.update(data, UpdateIndex(step, 0, tuple(range(ROWS))), get_random_state())
        usage = RankUsage(build, read_resident_peak() - before, reset_resident_peak() - before)
        return RankUsage(*map(max, zip(*group.all_gather(usage), strict=True)))


def main() -> None:
    """NAME LAYERS WIDTH VOCABULARY LENGTH: print the usage of the largest rank, on rank 0."""
    torch.set_num_threads(1)
    name, *sizes = sys.argv[1:]
    usage = measure_rank(name, *map(int, sizes))
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(json.dumps(usage) + "\n")


if __name__ == "__main__":
    main()
