"""Fast-weight memories: chunked against recurrent form, time by length, and comparison with titans-pytorch."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.measure import ABSENT, Scale, Table, Workload, clock, clock_name, time_interleaved, verdict
from laconic.config.nested import TitansOptions
from laconic.nested import state as values
from laconic.nested.hope.layer import SelfTitans, build_memories, mix_inputs
from laconic.nested.hope.layer import initial_state as initial_hope_state
from laconic.nested.recurrence.chunked_scan import pack_left, scan_chunks
from laconic.nested.recurrence.gated_delta_rule import Gates, chunk_gated_delta_rule
from laconic.nested.titans import equations as definition
from laconic.nested.titans.layer import Titans, build_memory, compute_gates, initial_state, memory_start
from tests.reference.gated_delta_rule import recurrent_gated_delta_rule
from tests.reference.self_titans import recurrent_self_titans as self_modifying
from tests.reference.titans import recurrent_titans

CHUNK, HEADS = 64, 4


def width(scale: Scale) -> int:
    """Return the width of the layers: heads of 64 if the scale allows it."""
    return min(scale.width, 64 * HEADS)


def pairs(scale: Scale) -> dict[str, tuple[Workload, Workload, int, int]]:
    """Return the chunked form, the recurrent form and their numbers of tokens; both read the same projected inputs."""
    T, D = min(scale.streams), width(scale)
    num_recurrent, E = min(T, 2 * CHUNK), D // HEADS
    x = torch.randn(1, T, D)
    workloads: dict[str, tuple[Workload, Workload, int, int]] = {}
    S = torch.zeros(1, HEADS, E, E)
    k = torch.nn.functional.normalize(torch.randn(1, HEADS, T, E), dim=-1)
    u, q = torch.randn(1, HEADS, T, E), torch.randn(1, HEADS, T, E)
    gates = Gates(torch.full((1, HEADS, T), 0.99), torch.full((1, HEADS, T), 0.5))
    workloads["delta rule"] = (
        lambda: recurrence(chunk_gated_delta_rule, S, k, u, q, gates, T),
        lambda: recurrence(recurrent_gated_delta_rule, S, k, u, q, gates, num_recurrent),
        T,
        num_recurrent,
    )
    for depth, name in ((1, "Titans, a matrix"), (2, "Titans, two layers")):
        workloads[name] = (*titans_workloads(x, depth, num_recurrent), T, num_recurrent)
    layer = SelfTitans(D, HEADS)
    heads, q_static, _ = mix_inputs(layer.params, initial_hope_state(layer.params, 1), x, None)
    state = initial_hope_state(layer.params, 1).memory
    workloads["self-modifying Titans"] = (
        lambda: scan_chunks(build_memories(layer.params), state, (heads, q_static), None),
        lambda: self_modifying(
            layer.shape, layer.params.weights, heads[:, :, :num_recurrent], q_static[:, :, :num_recurrent]
        ),
        T,
        num_recurrent,
    )
    return workloads


def recurrence(form: Any, S: Any, k: Any, u: Any, q: Any, gates: Gates, T: int) -> None:
    """Run the delta rule over T tokens, one chunk per call."""
    for a in range(0, T, CHUNK):
        at = slice(a, min(a + CHUNK, T))
        gates_ = Gates(gates.decay[..., at], gates.step_size[..., at], erase=gates.step_size[..., at])
        S = form(S, k[:, :, at], u[:, :, at], q[:, :, at], gates_).S


def titans_workloads(x: torch.Tensor, depth: Any, num_recurrent: int) -> tuple[Workload, Workload]:
    """Return the chunked and the recurrent form of a Titans memory."""
    layer = Titans(x.shape[2], HEADS, CHUNK, TitansOptions(memory_depth=depth))
    params = layer.params
    state, w = initial_state(params, 1), params.weights
    projected = definition.project_qkv(x, w, state.conv_tails, HEADS, None)
    gates = compute_gates(params, pack_left(x, None))
    k, v, q, *gates_ = (part[:, :, :num_recurrent] for part in (projected.k, projected.v, projected.q, *gates))
    return (
        lambda: scan_chunks(build_memory(params, "full"), state.memory, (*projected[:3], *gates), None),
        lambda: recurrent_titans(memory_start(w), k, v, q, Gates(*gates_), CHUNK),
    )


@torch.no_grad()
def memories(scale: Scale) -> Table:
    """Return the table of the chunked and the recurrent forms."""
    rows: list[tuple[str, ...]] = []
    for name, (chunked, recurrent, T, num_recurrent) in pairs(scale).items():
        times = time_interleaved({"fast": chunked, "slow": recurrent}, scale.rounds, scale.patience)
        ours, theirs = T / clock(times["fast"]), num_recurrent / clock(times["slow"])
        rows.append((name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.1f}", verdict(ours / theirs, least=20)))
    D = width(scale)
    text = (
        f"Tokens per second by {clock_name()}, the best of {scale.rounds}: one row, {HEADS} heads of {D // HEADS}, "
        f"float32, no gradient, the memory alone, chunks of {CHUNK}, compared with the recurrent form, "
        "token by token."
    )
    head = ("memory", "chunked", "token by token", "ratio", "target")
    return Table("Chunked memories", text, head, rows)


@torch.no_grad()
def streams(scale: Scale) -> Table:
    """Return the table of time per token and bytes of the state by length."""
    layers: Mapping[str, Any] = {
        "Titans, a matrix": Titans(width(scale), HEADS, CHUNK, TitansOptions(memory_depth=1)),
        "Titans, two layers": Titans(width(scale), HEADS, CHUNK),
        "self-modifying Titans": SelfTitans(width(scale), HEADS),
    }
    rows: list[tuple[str, ...]] = []
    for name, layer in layers.items():
        texts = {T: torch.randn(1, T, width(scale)) for T in scale.streams}
        times = time_interleaved(
            {str(T): lambda x=x, layer=layer: layer(x) for T, x in texts.items()}, scale.rounds, scale.patience
        )
        microseconds = {T: 1e6 * clock(times[str(T)]) / T for T in scale.streams}
        sizes = {values.num_bytes(layer(x)[1]) for x in (texts[min(texts)], texts[max(texts)])}
        spread = max(microseconds.values()) / min(microseconds.values()) - 1
        rows.append((
            name, *(f"{microseconds[T]:.1f}" for T in scale.streams), f"{100 * spread:.0f} %",
            verdict(100 * spread, most=10, digits=0), " and ".join(f"{n:,}" for n in sorted(sizes)),
        ))  # fmt: skip
    text = (
        f"Microseconds per token of the whole layer by {clock_name()}, the best of {scale.rounds}: one row, width "
        f"{width(scale)}, {HEADS} heads, chunks of {CHUNK}, float32, no gradient; bytes of the state after the "
        "shortest and the longest text; one number if they are equal."
    )
    lengths = tuple(f"{T:,}" for T in scale.streams)
    return Table("Memories by length", text, ("layer", *lengths, "spread", "target, %", "state bytes"), rows)


def titans(scale: Scale) -> Table:
    """Return the table of forward and backward against titans-pytorch with the same width."""
    rows: list[tuple[str, ...]] = []
    T = min(*scale.streams, 4 * CHUNK)  # titans-pytorch stores a gradient of every weight for each token
    D = width(scale)
    x = torch.randn(1, T, D)
    for depth, expansion in ((1, 1), (2, 4)):
        ours = Titans(
            D, HEADS, CHUNK, TitansOptions(memory_depth=1 if depth == 1 else 2, mlp_width=expansion * D // HEADS)
        )
        workloads: dict[str, Workload] = {"ours": lambda layer=ours: layer(x)[0].sum().backward()}
        workloads |= {
            name: lambda layer=layer: layer(x)[0].sum().backward() for name, layer in peers(D, depth, expansion).items()
        }
        timings = time_interleaved(workloads, min(scale.rounds, 2), scale.patience)
        speed = {name: T / clock(times) for name, times in timings.items()}
        for name in ("each token", "each chunk"):
            theirs = speed.get(name)
            ratio = 0.0 if theirs is None else speed["ours"] / theirs
            rows.append((
                f"{depth} layer{'s' * (depth > 1)}", name, f"{speed['ours']:,.0f}",
                ABSENT if theirs is None else f"{theirs:,.0f}", ABSENT if theirs is None else f"{ratio:.1f}",
                ABSENT if theirs is None else verdict(ratio, least=3),
            ))  # fmt: skip
    text = (
        f"Tokens per second by {clock_name()}, forward and backward of a whole layer: one row of {T:,} tokens, width "
        f"{D}, {HEADS} heads, float32. laconic writes at every token and takes gradients at the start of each chunk of "
        f"{CHUNK}. "
        "`NeuralMemory` of titans-pytorch does the same with `chunk_size=1, batch_size=64`; with `chunk_size=64` it "
        "writes once per chunk, so no token reads what its own chunk wrote: less work, and another function."
    )
    return Table(
        "Titans against titans-pytorch",
        text,
        ("memory", "titans-pytorch writes", "laconic", "titans-pytorch", "ratio", "target"),
        rows,
    )


def peers(D: int, depth: int, expansion: int) -> dict[str, Any]:
    """Return the same memory in titans-pytorch; nothing if it is not installed."""
    if find_spec("titans_pytorch") is None:
        return {}
    from titans_pytorch import MemoryMLP, NeuralMemory  # type: ignore[import-not-found]

    E = D // HEADS
    return {
        name: NeuralMemory(
            dim=D,
            heads=HEADS,
            dim_head=E,
            model=MemoryMLP(E, depth=depth, expansion_factor=float(expansion)),
            **options,
        )
        for name, options in {
            "each token": {"chunk_size": 1, "batch_size": CHUNK}, "each chunk": {"chunk_size": CHUNK},
        }.items()
    }  # fmt: skip
