"""Training metrics of the memories of a Hope model: their gates and norms.

Nested Learning arXiv:2512.24695. Symbols: P the shared state of a group of memories; E the width of a head.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.nested.hope.layer import SelfTitans, build_memories, mix_inputs
from laconic.nested.hope.memories import SelfModifyingMemories
from laconic.nested.hope.model import Hope
from laconic.nested.hope.task_updates import empty_open_chunk
from laconic.nested.recurrence.chunked_scan import pack_left
from laconic.nested.recurrence.gated_delta_rule import Gates, PerToken, max_step_within_norm
from laconic.nested.recurrence.memory_cells import Start, materialize
from laconic.nested.state import (
    FastWeightState,
    LayerState,
    MLPMemoryState,
    select_rows,
)
from laconic.nested.titans.equations import MEMORY
from laconic.nested.titans.layer import Titans, compute_gates

GATE_SAMPLE_TOKENS = 16  # tokens whose gates are averaged
LOW_QUANTILE, HIGH_QUANTILE = 0.1, 0.9  # over these tokens and the heads
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
    longest = select_rows(state, [row])
    ids = input_ids[row, valid[row]][None, -GATE_SAMPLE_TOKENS:]
    open_chunk = None if longest.open_chunk is None else empty_open_chunk(longest.layers, ids)
    names = tuple(f"hidden.{n}" for n in range(len(memories)))
    output = model(model.embed(ids), replace(longest, open_chunk=open_chunk), capture=names, update_weights=False)
    values: dict[str, list[Tensor]] = {}
    for name, memory, block, layer, all_rows in zip(
        names, memories, model.blocks, longest.layers, state.layers, strict=True
    ):
        x = block.submodule("norm1")(output.activations[name])
        parts = [gate_metrics(group, gates) for group, gates in group_gates(memory, layer, x).items()]
        parts += [cap_metrics(memory, layer, x), memory_norms(memory, all_rows)]
        for key, value in (item for part in parts for item in part.items()):
            values.setdefault(key, []).append(value.double())
    return {key: torch.stack(xs).mean() for key, xs in values.items()}


def gate_metrics(group: str, gates: Gates) -> Metrics:
    """Return the half-life in tokens at the mean decay rate, the mean step size, and quantiles of both."""
    decay_rate = -gates.decay.double().log()
    half_lives = math.log(2) / decay_rate.clamp(min=1e-12)
    step_sizes = gates.step_size.double()
    means = math.log(2) / decay_rate.mean().clamp(min=1e-12), step_sizes.mean()
    metrics: Metrics = {}
    for name, x, mean in zip((f"{group}_half_life", f"{group}_step"), (half_lives, step_sizes), means, strict=True):
        metrics |= {name: mean, f"{name}_low": x.quantile(LOW_QUANTILE), f"{name}_high": x.quantile(HIGH_QUANTILE)}
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
    if isinstance(memory, Titans):
        return {}
    heads, q, _ = mix_inputs(memory.params, layer, x, None)
    memories = build_memories(memory.params)
    recording = CapRecordingMemories(memories.shape, memories.w, memories.outer_gradient)
    recording.step_chunk(layer.memory, (heads, q), None)
    values: dict[str, list[Tensor]] = {}
    for group, is_capped in recording.capped_writes:
        values.setdefault(f"{group}_capped", []).append(is_capped.mean())
    return {name: torch.stack(xs).mean() for name, xs in values.items()}


def matrix_starts(memory: Memory, name: str) -> tuple[Start, ...]:
    """Return what a state's matrices are relative to: trained weights, the identity for P (None), or 0 for Q."""
    w = memory.params.weights
    if f"{name}.W1" in w:
        return w[f"{name}.W1"], w[f"{name}.W2"]
    if isinstance(memory, Titans):
        return (w[f"{name}.M"],)
    return (build_memories(memory.params).linear_start(name),)


def group_gates(memory: Memory, layer: LayerState, x: Float[Tensor, "B T D"]) -> dict[str, Gates]:
    if isinstance(memory, SelfTitans):
        heads, _, _ = mix_inputs(memory.params, layer, x, None)
        memories = build_memories(memory.params)
        return {group: memories.compute_gates(layer.memory, heads, group) for group in memory.shape.group_chunk_sizes}
    decay, step_size, *_ = compute_gates(memory.params, pack_left(x, None))
    return {MEMORY: Gates(decay, step_size)}


def memory_norms(memory: Memory, layer: LayerState) -> Metrics:
    """Return ‖state‖ / √E of every memory, averaged over rows and heads; of an MLP the rms of its two layers."""
    norms: Metrics = {}
    for name, state in layer.memory.items():
        parts = (state.W1, state.W2) if isinstance(state, MLPMemoryState) else (state,)
        pairs = zip(matrix_starts(memory, name), parts, strict=True)
        matrices = [materialize(start, part.change) for start, part in pairs]
        squared = [matrix.square().sum((-2, -1)) / matrix.shape[-1] for matrix in matrices]
        norms[f"{name}_norm"] = torch.stack(squared).mean(0).sqrt().mean()
    return norms
