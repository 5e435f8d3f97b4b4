"""Training metrics of the memories of a Hope model: their gates and norms.

Nested Learning arXiv:2512.24695. Symbols: P the shared state of a group of memories; E the width of a head.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.nested.hope import layer as hope_layer
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.hope.memories import SelfModifyingMemories
from laconic.nested.hope.model import Hope
from laconic.nested.hope.task_updates import empty_open_chunk
from laconic.nested.recurrence.chunked_scan import ChunkedMemory, pack_left
from laconic.nested.recurrence.gated_delta_rule import Gates, PerToken, max_step_within_norm
from laconic.nested.recurrence.memory_cells import MemoryStart, MLPStart, materialize
from laconic.nested.state import (
    FastWeightState,
    LayerState,
    LinearMemoryState,
    MemoryState,
    MLPMemoryState,
    select_rows,
)
from laconic.nested.titans import layer as titans_layer
from laconic.nested.titans.layer import Titans

GATE_SAMPLE_TOKENS = 16  # tokens whose gates are averaged
LOW_QUANTILE, HIGH_QUANTILE = 0.1, 0.9  # over these tokens and the heads
GUARD_TOLERANCE = 1e-3  # relative distance to its bound within which a norm counts as clipped
Metrics = dict[str, Tensor]
Memory = SelfTitans | Titans


def memory_metrics(
    model: Hope, state: FastWeightState, input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"] | None
) -> Metrics:
    """Return the metrics of the memories, averaged over layers; those of gates are of the longest row."""
    modules = [dict(block.named_children()).get("memory") for block in model.blocks]
    memories = [module for module in modules if isinstance(module, SelfTitans | Titans)]
    if not memories:
        return {}
    valid = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None and bool(attention_mask.any()):  # else gates of padding, so that metrics are the same
        valid = attention_mask
    row = int(valid.sum(1).argmax())
    longest, ids = select_rows(state, [row]), input_ids[row, valid[row]][None, -GATE_SAMPLE_TOKENS:]
    open_chunk = None if longest.open_chunk is None else empty_open_chunk(longest.layers, ids)
    names = tuple(f"hidden.{n}" for n in range(len(memories)))
    output = model(model.embed(ids), replace(longest, open_chunk=open_chunk), capture=names, update_weights=False)
    values: dict[str, list[Tensor]] = {}
    for name, memory, block, layer, all_rows in zip(
        names, memories, model.blocks, longest.layers, state.layers, strict=True
    ):
        x = block.submodule("norm1")(output.activations[name])
        parts = [gate_metrics(group, gates) for group, gates in group_gates(memory, layer, x).items()]
        parts += [cap_metrics(memory, layer, x), guard_metrics(memory, all_rows)]
        parts += [{f"{key}_norm": norm} for key, norm in memory_norms(memory, all_rows).items()]
        for key, value in (item for part in parts for item in part.items()):
            values.setdefault(key, []).append(value.double())
    return {key: torch.stack(xs).mean() for key, xs in values.items()}


def gate_metrics(group: str, gates: Gates) -> Metrics:
    """Return the half-life in tokens at the mean decay rate, the mean step size, and quantiles of both."""
    decay_rate = -gates.decay.double().log()
    half_lives, step_sizes = math.log(2) / decay_rate.clamp(min=1e-12), gates.step_size.double()
    metrics = {
        f"{group}_half_life": math.log(2) / decay_rate.mean().clamp(min=1e-12),
        f"{group}_step": step_sizes.mean(),
    }
    for name, x in ((f"{group}_half_life", half_lives), (f"{group}_step", step_sizes)):
        metrics |= {f"{name}_low": x.quantile(LOW_QUANTILE), f"{name}_high": x.quantile(HIGH_QUANTILE)}
    return metrics


@dataclass(frozen=True)
class CapRecordingMemories(SelfModifyingMemories):
    """The memories of a layer; they record which writes of each group are bounded by the cap."""

    capped_writes: list[tuple[str, Tensor]] = field(default_factory=list[tuple[str, Tensor]])

    def cap_gates(self, gates: Gates, group: str, write_norm: PerToken) -> Gates:
        """Record the writes whose step size the cap bounds."""
        max_norm = self.shape.options.max_projection_norm
        if max_norm and group != "memory":
            is_capped = gates.step_size > max_step_within_norm(gates.decay, write_norm, max_norm)
            self.capped_writes.append((group, is_capped.double()))
        return super().cap_gates(gates, group, write_norm)


def cap_metrics(memory: Memory, layer: LayerState, x: Float[Tensor, "B T D"]) -> Metrics:
    """Return the shares of capped writes and of limited step sizes of each group."""
    if isinstance(memory, Titans):
        return {}
    heads, q, _ = hope_layer.mix_inputs(memory.params, layer, x, None)
    memories, o = hope_layer.build_memories(memory.params, "none"), memory.shape.options
    recording = CapRecordingMemories(memories.shape, memories.w, memories.outer_gradient)
    recording.step_chunk(layer.memory, (heads, q), None)
    values: dict[str, list[Tensor]] = {}
    for group, is_capped in recording.capped_writes:
        values.setdefault(f"{group}_capped", []).append(is_capped.mean())
    if o.delta_rule and o.max_lr > 1:
        for group in memory.shape.group_chunk_sizes:
            gates = memories.compute_gates(layer.memory, heads, group)
            values[f"{group}_contracted"] = [(gates.step_size >= 1 + gates.decay).double().mean()]
    return {name: torch.stack(xs).mean() for name, xs in values.items()}


def guard_metrics(memory: Memory, layer: LayerState) -> Metrics:
    """Return the share of states, over rows and heads, whose norm a slightly smaller bound would clip."""
    max_norm = memory.shape.options.max_memory_norm
    if not max_norm:
        return {}
    is_clipped: list[Tensor] = []
    for chunked, names in memories_with_guard(memory, max_norm * (1 - GUARD_TOLERANCE)):
        states = {name: memory_at_boundary(state) for name, state in layer.memory.items()}
        clipped = chunked.end_chunks(states, names)
        for name in names:
            for old, new in zip(linear_parts(states[name]), linear_parts(clipped[name]), strict=True):
                distance = (new.change - old.change).square().sum((-2, -1)).sqrt()
                is_clipped.append(distance > GUARD_TOLERANCE / 4 * max_norm)
    group = memory.shape.group_of("memory") if isinstance(memory, SelfTitans) else "memory"
    return {f"{group}_guarded": torch.stack([x.double().mean() for x in is_clipped]).mean()}


def memories_with_guard(memory: Memory, max_norm: float) -> list[tuple[ChunkedMemory, list[str]]]:
    """Return the memories whose norm is bounded, with the bound `max_norm` instead, and the names of their states."""
    if isinstance(memory, Titans):
        return [(titans_layer.build_memory(memory.params, "none", max_norm), ["memory"])]
    memories = hope_layer.build_memories(memory.params, "none")
    options = memories.shape.options.model_copy(update={"max_memory_norm": max_norm})
    shape = replace(memories.shape, options=options)
    read_group = shape.group_of("memory")
    names = [name for name, group in memories.state_groups.items() if group == read_group]
    return [(replace(memories, shape=shape), names)]


def memory_at_boundary(state: MemoryState) -> MemoryState:
    """Return a memory's state at the end of its last chunk."""
    if isinstance(state, MLPMemoryState):
        return MLPMemoryState(
            replace(state.W1, change=state.W1.boundary_change), replace(state.W2, change=state.W2.boundary_change)
        )
    return replace(state, change=state.boundary_change)


def linear_parts(state: MemoryState) -> tuple[LinearMemoryState, ...]:
    """Return the states of a memory's matrices."""
    return (state.W1, state.W2) if isinstance(state, MLPMemoryState) else (state,)


def group_gates(memory: Memory, layer: LayerState, x: Float[Tensor, "B T D"]) -> dict[str, Gates]:
    """Return the gates of every group for these inputs."""
    if isinstance(memory, SelfTitans):
        heads, _, _ = hope_layer.mix_inputs(memory.params, layer, x, None)
        memories = hope_layer.build_memories(memory.params, "none")
        return {group: memories.compute_gates(layer.memory, heads, group) for group in memory.shape.group_chunk_sizes}
    gates = titans_layer.compute_gates(memory.params, pack_left(x, None))
    return {"memory": Gates(gates[0], gates[1])}


def memory_norms(memory: Memory, layer: LayerState) -> Metrics:
    """Return ‖state‖ / √E of every memory, averaged over rows and heads; of an MLP the rms of its two layers."""
    return {name: memory_norm(state_start(memory, name), state).mean() for name, state in layer.memory.items()}


def state_start(memory: Memory, name: str) -> MemoryStart:
    """Return the matrix that a state is relative to: trained weights, the identity for P (None), or 0 for Q."""
    w = memory.params.weights
    if isinstance(memory, Titans) or f"{name}.W1" in w:
        return titans_layer.memory_start(w, name)
    if not memory.shape.adaptive:
        return w["memory.M"]
    return torch.zeros_like(w["memory.M"]) if name.endswith("_own") else None


def memory_norm(start: MemoryStart, state: MemoryState) -> Float[Tensor, "B H"]:
    """Return the Frobenius norm divided by the root of the width."""
    if isinstance(state, MLPMemoryState):
        assert isinstance(start, MLPStart)
        squared = [memory_norm(start.W1, state.W1).square(), memory_norm(start.W2, state.W2).square()]
        return torch.stack(squared).mean(0).sqrt()
    assert not isinstance(start, MLPStart)
    return materialize(start, state.change).square().sum((-2, -1)).div(state.change.shape[-1]).sqrt()
