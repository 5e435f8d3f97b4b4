"""Speed on an accelerator: decoding, a training step, the chunked delta rule and M3.

    python benchmarks/gpu.py [--only decoding training delta-rule optimizers] [--device cuda] [--size 1b]

Decoding and training are those of a random Llama in bfloat16, eager and compiled, beside transformers. The limit of
decoding is the time to read the weights once, that of training and the delta rule the speed of large matrix products.
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
import torch.nn.functional as F

from benchmarks.decoding import generate_laconic, generate_transformers
from benchmarks.delta_rule import CHUNK, load_fla, num_operations, random_inputs, run_chunks
from benchmarks.measure import ABSENT, PEERS, Scale, Table, describe_machine, load_average
from benchmarks.models import Pair, llama, model_pair, random_ids
from benchmarks.optimizers import PERIOD, build_optimizers, repeat_step
from benchmarks.training import batch_of, logits_of
from laconic import DecoderConfig
from laconic.generation import static_cache

# layers, width, V, H, G, F: sizes of Llama 3.2 1B and SmolLM2-135M
SIZES = {
    "1b": (16, 2048, 128_256, 32, 8, 8_192),
    "135m": (30, 576, 49_152, 9, 3, 1_536),
    "small": (8, 512, 32_000, 8, 4, 1_376),
    "tiny": (2, 32, 64, 2, 1, 64),
}
TABLES = ("decoding", "training", "delta-rule", "optimizers")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def config_of(size: str) -> DecoderConfig:
    """Return the configuration of a random Llama by the name of its size."""
    layers, width, vocab, heads, groups, mlp_size = SIZES[size]
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
    """Return the table of decoding."""
    speed = bandwidth(device, options.copy)
    min_seconds = weights_read(pair) / speed
    rows: list[tuple[str, ...]] = []
    for batch in options.batch:
        ids = random_ids(pair.ours.config, batch, options.prompt).to(device)

        def measure(name: str, workload: Callable[..., Any], batch: int = batch, **kwargs: Any) -> None:
            seconds_ = seconds(partial(workload, pair, ids, options.new, **kwargs), device, options.rounds)  # noqa: B023
            rows.append(row(name, seconds_, batch, options.new, min_seconds))

        measure("laconic, eager", generate_laconic)
        if options.compile:
            with compiled_steps(options.backend):
                measure("laconic, step compiled", generate_laconic)
        if not PEERS:
            rows.append(("transformers", str(batch), *[ABSENT] * 3))
            continue
        measure("transformers, dynamic cache, eager", generate_transformers)
        if device.type == "cuda" and options.compile:  # with a static cache, transformers compiles its own step on CUDA
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


def product_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Return the operations per second of a product of two square matrices."""
    a, b = torch.randn(2, size, size, device=device, dtype=dtype).unbind()
    return 20 * 2 * size**3 / seconds(lambda: [a @ b for _ in range(20)], device, 3)


def training(pair: Pair, device: torch.device, options: argparse.Namespace) -> Table:
    """Return the table of a training step: forward, backward and an AdamW update of all weights."""
    rate = product_rate(device, options.product, DTYPES[options.dtype])
    ids, targets = (t.to(device) for t in batch_of(pair.ours.config, Scale(batch=options.rows, length=options.tokens)))
    num_weights = pair.num_parameters - pair.ours.token_embedding.weight.numel()
    limit = 6 * num_weights * ids.numel() / rate
    rows: list[tuple[str, ...]] = []
    models = {"laconic": pair.ours.train()} | ({"transformers": pair.theirs.train()} if PEERS else {})
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=device.type == "cuda")
        for way in ("eager", "compiled") if options.compile else ("eager",):
            logits = logits_of if way == "eager" else torch.compile(logits_of, backend=options.backend)

            def update(model: Any = model, logits: Any = logits, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(logits(model, ids).flatten(0, 1).float(), targets.flatten()).backward()
                optimizer.step()

            time_ = seconds(update, device, options.rounds)
            rows.append((f"{name}, {way}", f"{ids.numel() / time_:,.0f}", f"{1e3 * time_:.1f}", f"{limit / time_:.0%}"))
        optimizer.zero_grad(set_to_none=True)
    text = (
        f"Forward, backward and AdamW on {options.rows} rows of {options.tokens} tokens, all weights, {options.dtype}, "
        f"random Llama of {pair.num_parameters / 1e6:,.4g} M parameters, wall time, best of {options.rounds}. "
        f"Utilization: 6 operations per weight and token, without attention, at the {rate / 1e12:,.1f} TFLOP/s that a "
        f"product of {options.product} × {options.product} reached."
    )
    return Table("Training step on an accelerator", text, ("implementation", "tokens/s", "ms", "utilization"), rows)


def delta_rules(device: torch.device, options: argparse.Namespace) -> Table:
    """Return the table of the chunked delta rule, forward and backward."""
    heads, width, T = options.delta_rule
    limit = 3 * num_operations(heads, width, T) / product_rate(device, 512, torch.float32)
    ways: dict[str, tuple[Callable[..., Any], torch.dtype]] = {"laconic, float32": (run_chunks, torch.float32)}
    if options.compile:
        ways["laconic, float32, compiled"] = torch.compile(run_chunks, backend=options.backend), torch.float32
    if (naive := load_fla()) is not None:
        ways["flash-linear-attention in PyTorch, float32"] = partial(naive, chunk_size=CHUNK), torch.float32
    if naive is not None and device.type == "cuda":
        from fla.ops.delta_rule import chunk_delta_rule  # pyright: ignore[reportMissingImports]

        ways["flash-linear-attention in Triton, bfloat16"] = (
            lambda q, k, v, rate: chunk_delta_rule(*(t.transpose(1, 2) for t in (q, k, v, rate))),
            torch.bfloat16,
        )
    rows: list[tuple[str, ...]] = []
    for name, (function, dtype) in ways.items():
        inputs = [t.to(device, dtype).requires_grad_() for t in random_inputs(heads, width, T)]

        def both(function: Any = function, inputs: Any = inputs) -> None:
            function(*inputs)[0].sum().backward()

        time_ = seconds(both, device, options.rounds)
        rows.append((name, f"{1e3 * time_:.2f}", f"{limit / time_:.0%}"))
    text = (
        f"Forward and backward of one text of {T:,} tokens, {heads} heads of width {width}, chunks of {CHUNK}, wall "
        f"time, best of {options.rounds}. Products: three times the forward's products at the speed of a product of "
        "512 × 512 in float32, as a share of the time."
    )
    return Table("Chunked delta rule on an accelerator", text, ("implementation", "ms", "products"), rows)


def optimizers(device: torch.device, options: argparse.Namespace) -> Table:
    """Return the table of optimizer steps."""
    layers, width, *_ = SIZES[options.size]
    rows: list[tuple[str, ...]] = []
    first = 0.0
    for name, optimizer in build_optimizers(layers, width, device).items():
        time_ = seconds(repeat_step(optimizer), device, options.rounds) / PERIOD
        first = first or time_
        rows.append((name, f"{1e3 * time_:.2f}", f"{time_ / first:.2f}"))
    text = (
        f"{PERIOD} steps on the matrices of {layers} Llama blocks of width {width}, float32, wall time, best of "
        f"{options.rounds}."
    )
    return Table("Optimizers on an accelerator", text, ("optimizer", "ms per step", "ratio to Muon"), rows)


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
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out the compiled rows")
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--rows", type=int, default=4, help="rows of a training step")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each row of a training step")
    parser.add_argument("--product", type=int, default=8192, help="size of the matrices that measure the limit")
    parser.add_argument(
        "--delta-rule", type=int, nargs=3, default=[16, 128, 4096], metavar=("HEADS", "WIDTH", "TOKENS")
    )
    parser.add_argument("--copy", type=int, default=1024, help="MiB to copy when measuring the bandwidth")
    command = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(command)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    pages: list[str] = []
    caption = f"`{' '.join(['python benchmarks/gpu.py', *command])}` · {name} · {describe_machine()}"
    for table in make_tables(device, options):
        pages.append(f"{table.markdown()}\n\n<sub>{caption} · load average {load_average()}</sub>")
        print(pages[-1], flush=True)
    return "\n\n".join(pages)


def make_tables(device: torch.device, options: argparse.Namespace) -> Iterator[Table]:
    """Measure and yield the tables that `--only` names."""
    if "decoding" in options.only or "training" in options.only:
        config = config_of(options.size)
        with model_pair(options.size, config, dtype=DTYPES[options.dtype], device=device) as pair:
            if "decoding" in options.only:
                yield decoding(pair, device, options)
            if "training" in options.only:
                yield training(pair, device, options)
    if "delta-rule" in options.only:
        yield delta_rules(device, options)
    if "optimizers" in options.only:
        yield optimizers(device, options)


if __name__ == "__main__":
    main()
