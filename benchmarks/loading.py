"""Time and peak memory of loading a checkpoint, in a separate child process each."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import (
    ABSENT,
    PEERS,
    Scale,
    Table,
    read_resident_peak,
    reset_resident_peak,
    run_python,
    timed,
    verdict,
)
from benchmarks.models import large_llama
from laconic import Decoder, DecoderConfig

LOADS = 3


def checkpoints(scale: Scale, scratch: Path) -> list[tuple[str, Path]]:
    """Write the checkpoints: one file, four shards, bfloat16 loaded as float32, and GPT-2 with transposed weights."""
    decoder = Decoder(large_llama(scale))
    num_bytes = sum(p.nbytes for p in decoder.parameters())
    saved = [("llama", scratch / "one"), ("llama", scratch / "four"), ("llama in bfloat16", scratch / "half")]
    decoder.save_pretrained(saved[0][1])
    decoder.save_pretrained(saved[1][1], max_shard_bytes=num_bytes / 3.4)
    decoder.save_pretrained(saved[2][1], dtype=torch.bfloat16)
    layers, width = scale.large or (scale.layers, scale.width)
    source = {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": 2, "vocab_size": scale.vocab}
    Decoder(DecoderConfig.from_dict(source)).save_pretrained(scratch / "gpt2")
    return [*saved, ("gpt2, with transposed weights", scratch / "gpt2")]


def loading(scale: Scale) -> Table:
    """Return the table of loading."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in checkpoints(scale, Path(scratch))[: scale.checkpoints]:
            saved = {
                side: run_python("-m", "benchmarks.loading", side, str(folder)).json()
                for side in ("ours", *(["theirs"] if PEERS and scale.peers_alone else []))
            }
            files = len(list(folder.glob("*.safetensors")))
            rows.append(row(f"{name}, {files} file{'s' * (files > 1)}", saved["ours"], saved.get("theirs")))
    text = (
        "`Decoder.from_pretrained(folder, dtype=torch.float32)` in a child process, files in the page cache. Peak: the "
        "high-water mark of the resident set, mapped files included, above that after the imports, "
        "over the bytes of the weights in float32. transformers maps the file and returns before reading it, "
        "so its memory grows later, in the first pass. "
        f"Time: wall seconds, best of {LOADS} after the load that gave the peak; laconic's time includes reading the "
        "file, because it checks every element for NaN and infinity."
    )
    head = ("checkpoint", "weights, MB", "laconic peak", "target", "transformers peak", "laconic s", "transformers s")
    return Table("Loading", text, head, rows)


def row(name: str, ours: dict[str, float], theirs: dict[str, float] | None) -> tuple[str, ...]:
    """Return one row."""
    ratio = ours["peak"] / ours["bytes"]
    beside = (ABSENT, ABSENT) if theirs is None else (f"{theirs['peak'] / theirs['bytes']:.2f}", f"{theirs['s']:.2f}")
    megabytes = f"{ours['bytes'] / 1e6:.0f}"
    return name, megabytes, f"{ratio:.2f}", verdict(ratio, most=1.15), beside[0], f"{ours['s']:.2f}", beside[1]


def measure_load(side: str, folder: str) -> dict[str, float]:
    """Return the peak memory of the first load after the imports, and the best time of later loads."""
    if side == "ours":

        def load() -> Any:
            return Decoder.from_pretrained(folder, dtype=torch.float32)

    else:
        from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, logging  # noqa: F401

        logging.set_verbosity_error()
        logging.disable_progress_bar()

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    before = reset_resident_peak()
    model = load()
    peak = read_resident_peak() - before
    num_parameters = sum(p.nbytes for p in model.parameters())
    del model
    times = [timed(load).wall for _ in range(LOADS)]
    return {"peak": float(peak), "bytes": float(num_parameters), "s": min(times)}


if __name__ == "__main__":
    print(json.dumps(measure_load(*sys.argv[1:])))
