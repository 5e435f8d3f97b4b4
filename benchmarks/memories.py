"""Memories that are written while they are read: by chunks against token by token, by length, beside titans-pytorch."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.measure import ABSENT, Scale, Table, Way, clock, clock_name, race, verdict
from laconic.config.nested import TitansOptions
from laconic.nested import state as values
from laconic.nested.hope.layer import SelfTitans, build_memories, mix_inputs
from laconic.nested.hope.layer import initial_state as begin
from laconic.nested.recurrence.chunked_scan import ScanOptions, scan_chunks
from laconic.nested.recurrence.gated_delta_rule import Gates, chunk_gated_delta_rule
from laconic.nested.recurrence.packing import pack_left
from laconic.nested.titans import equations as definition
from laconic.nested.titans.layer import Titans, compute_gates, initial_state, memory_start, scan_all_memories
from tests.reference.gated_delta_rule import recurrent_gated_delta_rule
from tests.reference.self_titans import recurrent_self_titans as self_modifying
from tests.reference.titans import recurrent_titans

CHUNK, HEADS = 64, 4
FULL = ScanOptions("full", None, {}, False)


def width(scale: Scale) -> int:
    """Of the layers: heads of 64 where there is room."""
    return min(scale.width, 64 * HEADS)


def pairs(scale: Scale) -> dict[str, tuple[Way, Way, int, int]]:
    """Chunk form, definition, and how many tokens each reads; both from the same vectors, without projections."""
    T, D = min(scale.streams), width(scale)
    few, E = min(T, 2 * CHUNK), D // HEADS
    x = torch.randn(1, T, D)
    ways: dict[str, tuple[Way, Way, int, int]] = {}
    S = torch.zeros(1, HEADS, E, E)
    k = torch.nn.functional.normalize(torch.randn(1, HEADS, T, E), dim=-1)
    u, q = torch.randn(1, HEADS, T, E), torch.randn(1, HEADS, T, E)
    gates = Gates(torch.full((1, HEADS, T), 0.99), torch.full((1, HEADS, T), 0.5))
    ways["delta rule"] = (
        lambda: recurrence(chunk_gated_delta_rule, S, k, u, q, gates, T),
        lambda: recurrence(recurrent_gated_delta_rule, S, k, u, q, gates, few),
        T,
        few,
    )
    for depth, name in ((1, "Titans, a matrix"), (2, "Titans, two layers")):
        ways[name] = (*titans_ways(x, depth, few), T, few)
    layer = SelfTitans(D, HEADS)
    heads, q_static, _ = mix_inputs(layer.params, begin(layer.params, 1), x, None)
    memory = begin(layer.params, 1).memory
    ways["self-modifying Titans"] = (
        lambda: scan_chunks(build_memories(layer.params), memory, (heads, q_static), None, FULL),
        lambda: self_modifying(layer.shape, layer.params.weights, heads[:, :, :few], q_static[:, :, :few]),
        T,
        few,
    )
    return ways


def recurrence(form: Any, S: Any, k: Any, u: Any, q: Any, gates: Gates, T: int) -> None:
    """The delta rule over T tokens, a chunk a call."""
    for a in range(0, T, CHUNK):
        at = slice(a, min(a + CHUNK, T))
        chunk_gates = Gates(gates.decay[..., at], gates.step_size[..., at])
        S = form(S, k[:, :, at], u[:, :, at], q[:, :, at], chunk_gates, erase=chunk_gates.step_size).S


def titans_ways(x: torch.Tensor, depth: Any, few: int) -> tuple[Way, Way]:
    """One memory of Titans, by chunks and by its definition."""
    params = Titans(x.shape[2], HEADS, CHUNK, TitansOptions(memory_depth=depth)).params
    state, w = initial_state(params, 1), params.weights
    qkv = definition.project_qkv(x, w, state.conv_tails, HEADS, None)
    gates = compute_gates(params, pack_left(x, None))
    k, v, q, *few_gates = (part[:, :, :few] for part in (qkv.k, qkv.v, qkv.q, *gates))
    return (
        lambda: scan_all_memories(params, state.memory, (*qkv[:3], *gates), None, FULL),
        lambda: recurrent_titans(memory_start(w, "memory"), k, v, q, Gates(*few_gates), CHUNK),
    )


@torch.no_grad()
def memories(scale: Scale) -> Table:
    """Tokens per second of the chunk form and of the definition."""
    rows: list[tuple[str, ...]] = []
    for name, (fast, slow, T, few) in pairs(scale).items():
        times = race({"fast": fast, "slow": slow}, scale.rounds, scale.patience)
        ours, theirs = T / clock(times["fast"]), few / clock(times["slow"])
        rows.append((name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.1f}", verdict(ours / theirs, least=20)))
    D = width(scale)
    text = (
        f"Tokens per second by {clock_name()}, the best of {scale.rounds}: one row, {HEADS} heads of {D // HEADS}, "
        f"float32, no gradient, the memory alone, chunks of {CHUNK}. Beside it the definition, every matrix token by "
        "token."
    )
    head = ("memory", "by chunks", "token by token", "times", "target")
    return Table("Memories by chunks", text, head, rows)


@torch.no_grad()
def streams(scale: Scale) -> Table:
    """Time per token and bytes of the state by length."""
    layers: Mapping[str, Any] = {
        "Titans, a matrix": Titans(width(scale), HEADS, CHUNK, TitansOptions(memory_depth=1)),
        "Titans, two layers": Titans(width(scale), HEADS, CHUNK),
        "self-modifying Titans": SelfTitans(width(scale), HEADS),
    }
    rows: list[tuple[str, ...]] = []
    for name, layer in layers.items():
        texts = {T: torch.randn(1, T, width(scale)) for T in scale.streams}
        times = race(
            {str(T): lambda x=x, layer=layer: layer(x) for T, x in texts.items()}, scale.rounds, scale.patience
        )
        took = {T: 1e6 * clock(times[str(T)]) / T for T in scale.streams}
        sizes = {values.num_bytes(layer(x)[1]) for x in (texts[min(texts)], texts[max(texts)])}
        spread = max(took.values()) / min(took.values()) - 1
        rows.append((
            name, *(f"{took[T]:.1f}" for T in scale.streams), f"{100 * spread:.0f} %",
            verdict(100 * spread, most=10, digits=0), " and ".join(f"{n:,}" for n in sorted(sizes)),
        ))  # fmt: skip
    text = (
        f"Microseconds per token of the whole layer by {clock_name()}, the best of {scale.rounds}: one row, width "
        f"{width(scale)}, {HEADS} heads, chunks of {CHUNK}, float32, no gradient; bytes of the state after the "
        "shortest and the longest, one number where they are equal."
    )
    lengths = tuple(f"{T:,}" for T in scale.streams)
    return Table("Memories by length", text, ("layer", *lengths, "spread", "target, %", "bytes held"), rows)


def titans(scale: Scale) -> Table:
    """A memory of the same width in titans-pytorch, forward and backward."""
    rows: list[tuple[str, ...]] = []
    T, D = min(*scale.streams, 4 * CHUNK), width(scale)  # theirs holds a gradient of every weight for each token
    x = torch.randn(1, T, D)
    for depth, grown in ((1, 1), (2, 4)):
        ours = Titans(D, HEADS, CHUNK, TitansOptions(memory_depth=1 if depth == 1 else 2, mlp_width=grown * D // HEADS))
        ways: dict[str, Way] = {"ours": lambda layer=ours: layer(x)[0].sum().backward()}
        ways |= {
            name: lambda layer=layer: layer(x)[0].sum().backward() for name, layer in peers(D, depth, grown).items()
        }
        speeds = {name: T / clock(taken) for name, taken in race(ways, min(scale.rounds, 2), scale.patience).items()}
        for name in ("each token", "each chunk"):
            theirs = speeds.get(name)
            times = 0.0 if theirs is None else speeds["ours"] / theirs
            rows.append((
                f"{depth} layer{'s' * (depth > 1)}", name, f"{speeds['ours']:,.0f}",
                ABSENT if theirs is None else f"{theirs:,.0f}", ABSENT if theirs is None else f"{times:.1f}",
                ABSENT if theirs is None else verdict(times, least=3),
            ))  # fmt: skip
    text = (
        f"Tokens per second by {clock_name()}, forward and backward of a whole layer: one row of {T:,} tokens, width "
        f"{D}, {HEADS} heads, float32. Ours writes at each token and takes gradients at the start of each {CHUNK}. "
        "`NeuralMemory` of titans-pytorch does the same with `chunk_size=1, batch_size=64`; with `chunk_size=64` it "
        "writes once a chunk, so that no token reads what its own chunk wrote, which is less work and another function."
    )
    return Table(
        "Titans beside titans-pytorch", text, ("memory", "theirs writes", "ours", "theirs", "times", "target"), rows
    )


def peers(D: int, depth: int, grown: int) -> dict[str, Any]:
    """The same memory as titans-pytorch has it, where it is installed."""
    if find_spec("titans_pytorch") is None:
        return {}
    from titans_pytorch import MemoryMLP, NeuralMemory  # type: ignore[import-not-found]

    E = D // HEADS
    return {
        name: NeuralMemory(
            dim=D, heads=HEADS, dim_head=E, model=MemoryMLP(E, depth=depth, expansion_factor=float(grown)), **options
        )
        for name, options in {
            "each token": {"chunk_size": 1, "batch_size": CHUNK}, "each chunk": {"chunk_size": CHUNK},
        }.items()
    }  # fmt: skip
