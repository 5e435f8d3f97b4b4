"""Tables of `benchmarks/real.py`: time and memory of KV cache selection and of fitting a cartridge."""

from functools import partial
from pathlib import Path

import torch

import laconic
from benchmarks.measure import (
    REPO,
    Scale,
    Table,
    Workload,
    clock,
    clock_name,
    read_resident_peak,
    reset_resident_peak,
    time_interleaved,
    timed,
    verdict,
)
from benchmarks.models import random_ids
from laconic.compression.kv.cartridge import CartridgeConfig, fit_cartridge
from laconic.compression.kv.config import KVMethod
from laconic.compression.kv.selection import DocumentReader

METHODS: tuple[KVMethod, ...] = ("kvzip", "snapkv")
MOST_PASSES = 3.0
CHAPTER = REPO / "src" / "laconic" / "evaluation" / "compression" / "falling_star.txt"
FIT = CartridgeConfig()
FIT_MINUTES = 20.0  # of one core: ten of two
FIT_SHARE = 1 / 16  # of the document's tokens


def selection(model: Path, scale: Scale) -> Table:
    """Return the table of the time that selection takes, against reading the document, and of its peak memory."""
    decoder = laconic.Decoder.from_pretrained(model, dtype=torch.float32)
    weights, rows = sum(p.nbytes for p in decoder.parameters()), list[tuple[str, ...]]()
    for length in scale.documents:
        ids = random_ids(decoder.config, 1, length)
        document: list[int] = ids[0].tolist()
        workloads: dict[str, Workload] = {"reading": partial(read_document, decoder, document)}
        for method in METHODS:
            config = laconic.KVCompressionConfig(method)
            workloads[method] = partial(laconic.compress_kv, decoder, document, config)
        times = {name: clock(runs) for name, runs in time_interleaved(workloads, min(3, scale.rounds), warm=0).items()}
        cache = read_document(decoder, document).kv_bytes
        for method in METHODS:
            before = reset_resident_peak()
            workloads[method]()
            peak = (weights + read_resident_peak() - before - cache) / weights
            passes = times[method] / times["reading"]
            rows.append((
                method,
                f"{length:,}",
                f"{times['reading']:.2f}",
                f"{times[method]:.2f}",
                f"{passes:.2f}",
                verdict(passes, most=MOST_PASSES),
                f"{peak:.2f}",
                verdict(peak, most=1.3),
            ))  # fmt: skip
    text = (
        f"Seconds to keep an eighth of a document's keys and values (`laconic.compress_kv`), {clock_name()}, best of "
        f"{min(3, scale.rounds)}, rounds interleaved; reading: the same document in chunks, as a prompt is read. Peak: "
        "resident memory of weights and selection less the document's KV cache, over the bytes of the weights."
    )
    head = ("method", "tokens", "reading, s", "selection, s", "ratio", "target", "peak over weights", "target")
    return Table("KV cache selection", text, head, rows)


@torch.no_grad()
def read_document(decoder: laconic.Decoder, document: list[int]) -> laconic.KVCache:
    """Return the KV cache of a document, read in chunks."""
    return DocumentReader(decoder).read(torch.tensor([document]))


def fit(model: Path, scale: Scale) -> Table:
    """Return the table of the time that fitting a cartridge takes."""
    decoder = laconic.Decoder.from_pretrained(model, dtype=torch.float32)
    document = laconic.load_tokenizer(model).encode(CHAPTER.read_text(encoding="utf-8"))[: scale.fitted]
    config = CartridgeConfig(steps=scale.fit_steps, num_rows=scale.fit_rows)
    memory = laconic.compress_kv(decoder, document, laconic.KVCompressionConfig(keep=FIT_SHARE))
    study = timed(lambda: fit_cartridge(decoder, memory, document, CartridgeConfig(steps=1, num_rows=scale.fit_rows)))
    whole = timed(lambda: fit_cartridge(decoder, memory, document, config))
    step = (clock([whole]) - clock([study])) / (config.steps - 1)
    row = (clock([study]) - step) / config.num_rows
    minutes = (row * FIT.num_rows + step * FIT.steps) / 60
    text = (
        f"Time of `fit_cartridge`, in {clock_name()}, for {scale.fitted:,} tokens of `laconic demo read`'s chapter "
        f"and a sixteenth of their positions: {config.num_rows} rows of self-study with {config.steps} steps, and with "
        f"one. Minutes are computed from them for the default of {FIT.num_rows} rows and {FIT.steps} steps; the target "
        "is ten minutes of two cores."
    )
    head = ("tokens", "s per row of self-study", "s per step", "minutes", "target")
    rows = [(f"{scale.fitted:,}", f"{row:.2f}", f"{step:.2f}", f"{minutes:.1f}", verdict(minutes, most=FIT_MINUTES))]
    return Table("Fitting a cartridge", text, head, rows)
