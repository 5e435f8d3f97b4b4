"""Seconds and peak memory of loading a checkpoint, each in a child process of its own."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import ABSENT, PEERS, Scale, Table, child, resident, resident_peak, timed, verdict
from benchmarks.models import large
from laconic import Decoder, DecoderConfig

LOADS = 3


def checkpoints(scale: Scale, scratch: Path) -> list[tuple[str, Path]]:
    """What is loaded: one file, four shards, GPT-2's turned maps, and bfloat16 that becomes float32."""
    decoder = Decoder(large(scale))
    num_bytes = sum(p.nbytes for p in decoder.parameters())
    folders = [("llama", scratch / "one"), ("llama", scratch / "four"), ("llama in bfloat16", scratch / "half")]
    decoder.save_pretrained(folders[0][1])
    decoder.save_pretrained(folders[1][1], max_shard_bytes=num_bytes / 3.4)
    decoder.save_pretrained(folders[2][1], dtype=torch.bfloat16)
    layers, width = scale.large or (scale.layers, scale.width)
    source = {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": 2, "vocab_size": scale.words}
    Decoder(DecoderConfig.from_dict(source)).save_pretrained(scratch / "gpt2")
    return [*folders, ("gpt2, whose maps are turned", scratch / "gpt2")]


def loading(scale: Scale) -> Table:
    """The table of loading."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder in checkpoints(scale, Path(scratch))[: scale.checkpoints]:
            results = {
                side: child("-m", "benchmarks.loading", side, str(folder)).json()
                for side in ("ours", *(["theirs"] if PEERS and scale.peers_alone else []))
            }
            files = len(list(folder.glob("*.safetensors")))
            rows.append(row(f"{name}, {files} file{'s' * (files > 1)}", results["ours"], results.get("theirs")))
    text = (
        "`Decoder.from_pretrained(folder, dtype=torch.float32)` in a child process, files in the page cache. Peak: the "
        "high-water mark of the resident set, mapped files included, above what it was after the imports, "
        "over the bytes of the weights in float32. transformers maps the file and has not looked at it when it "
        "returns: its memory grows later, in the first pass. "
        f"Time: wall seconds, best of {LOADS} after the load that gave the peak; laconic's holds a pass over every "
        "element for NaN and infinity, and so the reading of the file."
    )
    head = ("checkpoint", "weights, MB", "laconic peak", "target", "transformers peak", "laconic s", "transformers s")
    return Table("Loading", text, head, rows)


def row(name: str, ours: dict[str, float], theirs: dict[str, float] | None) -> tuple[str, ...]:
    """One line of the table."""
    ratio = ours["peak"] / ours["bytes"]
    beside = (ABSENT, ABSENT) if theirs is None else (f"{theirs['peak'] / theirs['bytes']:.2f}", f"{theirs['s']:.2f}")
    megabytes = f"{ours['bytes'] / 1e6:.0f}"
    return name, megabytes, f"{ratio:.2f}", verdict(ratio, most=1.15), beside[0], f"{ours['s']:.2f}", beside[1]


def alone(side: str, folder: str) -> dict[str, float]:
    """Peak of the first load after the imports, and the best time of the next ones."""
    if side == "ours":

        def load() -> Any:
            return Decoder.from_pretrained(folder, dtype=torch.float32)

    else:
        from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, logging  # noqa: F401

        logging.set_verbosity_error()
        logging.disable_progress_bar()

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    before = resident()
    model = load()
    peak = resident_peak() - before
    size = sum(p.nbytes for p in model.parameters())
    del model
    times = [timed(load).wall for _ in range(LOADS)]
    return {"peak": float(peak), "bytes": float(size), "s": min(times)}


if __name__ == "__main__":
    print(json.dumps(alone(*sys.argv[1:])))
