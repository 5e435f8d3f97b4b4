"""Decoding of a 1B-sized random Llama in bfloat16 on an accelerator: `python benchmarks/gpu.py [--device] [--size]`.

Eager and compiled, beside transformers, and beside the time in which the device can read the weights once, which is
the least that a token can take.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.decoding import ours_generate, theirs_generate
from benchmarks.measure import ABSENT, PEERS, Table, load, machine
from benchmarks.models import Pair, llama, pair, random_ids
from laconic import DecoderConfig
from laconic.generation import static_cache

# layers, width, V, H, G, F: 1b has the sizes of Llama 3.2 1B
SIZES = {
    "1b": (16, 2048, 128_256, 32, 8, 8_192),
    "small": (8, 512, 32_000, 8, 4, 1_376),
    "tiny": (2, 32, 64, 2, 1, 64),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def config_of(size: str) -> DecoderConfig:
    """A random Llama by its size."""
    layers, width, words, heads, groups, feed = SIZES[size]
    return llama(layers, width, words, heads=heads, groups=groups, feed=feed)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(way: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The best of some calls, after one that compiles and warms."""
    way()
    times = []
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        way()
        wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes per second that the device moves in a large copy, counted once read and once written."""
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: goal.copy_(source), device, 5)


def weights_read(models: Pair) -> int:
    """Bytes of the weights that one step reads: all but the embedding matrix, whose rows it picks."""
    return sum(p.nbytes for p in models.ours.parameters()) - models.ours.token_embedding.weight.nbytes


@contextmanager
def compiled_steps(backend: str) -> Iterator[None]:
    """Run the step of `laconic.generate` through torch.compile, one graph for every cache length."""
    eager = static_cache.StaticCacheDecoder.step
    static_cache.StaticCacheDecoder.step = torch.compile(eager, backend=backend, dynamic=True)
    try:
        yield
    finally:
        static_cache.StaticCacheDecoder.step = eager


def row(name: str, took: float, batch: int, new: int, least: float) -> tuple[str, ...]:
    """One line: tokens per second, time of a step, and that over the least it can take."""
    a_step = took / new
    return name, str(batch), f"{batch * new / took:,.0f}", f"{1e3 * a_step:.2f}", f"{a_step / least:.2f}"


def decoding(models: Pair, device: torch.device, options: argparse.Namespace) -> Table:
    """The table."""
    speed = bandwidth(device, options.copy)
    least = weights_read(models) / speed
    rows: list[tuple[str, ...]] = []
    for batch in options.batch:
        ids = random_ids(models.ours.config, batch, options.prompt).to(device)

        def measure(name: str, way: Callable[..., Any], batch: int = batch, **more: Any) -> None:
            took = seconds(partial(way, models, ids, options.new, **more), device, options.rounds)  # noqa: B023
            rows.append(row(name, took, batch, options.new, least))

        measure("laconic, eager", ours_generate)
        with compiled_steps(options.backend):
            measure("laconic, step compiled", ours_generate)
        if not PEERS:
            rows.append(("transformers", str(batch), *[ABSENT] * 3))
            continue
        measure("transformers, dynamic cache, eager", theirs_generate)
        if device.type == "cuda":  # where a static cache makes transformers compile its step by itself
            measure("transformers, static cache, compiled", theirs_generate, cache="static")
    text = (
        f"Greedy, {options.dtype}, {options.new} new tokens on a prompt of {options.prompt}, prefill included, random "
        f"Llama of {models.size / 1e6:,.4g} M parameters, wall seconds, best of {options.rounds}. The least time of a step "
        f"is that of reading {weights_read(models) / 1e6:,.4g} MB of weights once at the {speed / 1e9:,.0f} GB/s which a "
        f"large copy reached here: {1e3 * least:.3f} ms."
    )
    return Table("Decoding on an accelerator", text, ("what", "batch", "tokens/s", "ms a step", "of the least"), rows)


def main(arguments: list[str] | None = None) -> str:
    """Measures, prints and returns the table."""
    parser = argparse.ArgumentParser(description="Decoding on an accelerator.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--copy", type=int, default=1024, help="MiB copied to find the bandwidth")
    command_line = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(command_line)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    with pair(options.size, config_of(options.size), dtype=DTYPES[options.dtype], device=device) as models:
        table = decoding(models, device, options)
    about = f"`{' '.join(['python benchmarks/gpu.py', *command_line])}` · {name} · {machine()} · load average {load()}"
    page = f"{table.markdown()}\n\n<sub>{about}</sub>"
    print(page)
    return page


if __name__ == "__main__":
    main()
