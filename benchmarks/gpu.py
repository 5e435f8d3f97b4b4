"""Decoding speed of a random 1B Llama in bfloat16 on an accelerator: `python benchmarks/gpu.py [--device] [--size]`.

Eager and compiled, compared with transformers and with the time the device needs to read the weights once, which is a
lower bound of the time per token.
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

from benchmarks.decoding import generate_laconic, generate_transformers
from benchmarks.measure import ABSENT, PEERS, Table, describe_machine, load_average
from benchmarks.models import Pair, llama, model_pair, random_ids
from laconic import DecoderConfig
from laconic.generation import static_cache

# layers, width, V, H, G, F: 1b has the sizes of Llama 3.2 1B
SIZES = {
    "1b": (16, 2048, 128_256, 32, 8, 8_192),
    "small": (8, 512, 32_000, 8, 4, 1_376),
    "tiny": (2, 32, 64, 2, 1, 64),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def config_of(num_parameters: str) -> DecoderConfig:
    """Return the configuration of a random Llama by the name of its size."""
    layers, width, vocab, heads, groups, mlp_size = SIZES[num_parameters]
    return llama(layers, width, vocab, heads=heads, groups=groups, mlp_size=mlp_size)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(workload: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the best time of some calls, after one that compiles and warms up."""
    workload()
    pair = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        workload()
        synchronize(device)
        pair.append(time.perf_counter() - start)
    return min(pair)


def bandwidth(device: torch.device, megabytes: int) -> float:
    """Return the bandwidth of a large copy in bytes per second, counting reads and writes."""
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=device)
    goal = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: goal.copy_(source), device, 5)


def weights_read(pair: Pair) -> int:
    """Return the bytes of weights that one step reads: all but the embedding matrix, of which it reads single rows."""
    return sum(p.nbytes for p in pair.ours.parameters()) - pair.ours.token_embedding.weight.nbytes


@contextmanager
def compiled_steps(backend: str) -> Iterator[None]:
    """Compile the decoding step of `laconic.generate`, with one graph for all cache lengths.

    Weights must not be packed for oneDNN, which torch.compile cannot trace.
    """
    eager, min_rows = static_cache.StaticCacheDecoder.step, static_cache.MIN_PACKED_ROWS
    static_cache.StaticCacheDecoder.step = torch.compile(eager, backend=backend, dynamic=True)
    static_cache.MIN_PACKED_ROWS = sys.maxsize
    try:
        yield
    finally:
        static_cache.StaticCacheDecoder.step, static_cache.MIN_PACKED_ROWS = eager, min_rows


def row(name: str, seconds_: float, batch: int, new: int, min_seconds: float) -> tuple[str, ...]:
    """Return a row: tokens per second, time per step, and its ratio to the lower bound."""
    step_seconds = seconds_ / new
    return (
        name,
        str(batch),
        f"{batch * new / seconds_:,.0f}",
        f"{1e3 * step_seconds:.2f}",
        f"{step_seconds / min_seconds:.2f}",
    )


def decoding(pair: Pair, device: torch.device, options: argparse.Namespace) -> Table:
    """Return the table."""
    speed = bandwidth(device, options.copy)
    min_seconds = weights_read(pair) / speed
    rows: list[tuple[str, ...]] = []
    for batch in options.batch:
        ids = random_ids(pair.ours.config, batch, options.prompt).to(device)

        def measure(name: str, workload: Callable[..., Any], batch: int = batch, **kwargs: Any) -> None:
            seconds_ = seconds(partial(workload, pair, ids, options.new, **kwargs), device, options.rounds)  # noqa: B023
            rows.append(row(name, seconds_, batch, options.new, min_seconds))

        measure("laconic, eager", generate_laconic)
        with compiled_steps(options.backend):
            measure("laconic, step compiled", generate_laconic)
        if not PEERS:
            rows.append(("transformers", str(batch), *[ABSENT] * 3))
            continue
        measure("transformers, dynamic cache, eager", generate_transformers)
        if device.type == "cuda":  # with a static cache, transformers compiles its own step on CUDA
            measure("transformers, static cache, compiled", generate_transformers, cache="static")
    text = (
        f"Greedy, {options.dtype}, {options.new} new tokens on a prompt of {options.prompt}, prefill included, random "
        f"Llama "
        f"of {pair.num_parameters / 1e6:,.4g} M parameters, wall seconds, best of {options.rounds}. The lower bound of "
        f"a step is the "
        f"time to read {weights_read(pair) / 1e6:,.4g} MB of weights once at the {speed / 1e9:,.0f} GB/s that a "
        f"large copy reached: {1e3 * min_seconds:.3f} ms."
    )
    return Table(
        "Decoding on an accelerator",
        text,
        ("implementation", "batch", "tokens/s", "ms per step", "ratio to lower bound"),
        rows,
    )


def main(arguments: list[str] | None = None) -> str:
    """Measure, print and return the table."""
    parser = argparse.ArgumentParser(description="Decoding on an accelerator.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--copy", type=int, default=1024, help="MiB to copy when measuring the bandwidth")
    command = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(command)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    with model_pair(
        options.num_parameters, config_of(options.num_parameters), dtype=DTYPES[options.dtype], device=device
    ) as pair:
        table = decoding(pair, device, options)
    command_line = " ".join(["python benchmarks/gpu.py", *command])
    caption = f"`{command_line}` · {name} · {describe_machine()} · load average {load_average()}"
    page = f"{table.markdown()}\n\n<sub>{caption}</sub>"
    print(page)
    return page


if __name__ == "__main__":
    main()
