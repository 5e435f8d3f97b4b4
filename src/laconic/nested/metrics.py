"""What a Hope did while it read, in a few numbers a step: updates of levels, their size, gates, norms, bytes.

Nested Learning arXiv:2512.24695. Levels are numbered by their chunks, the fastest 0, over all layers of a model.

Symbols: theta_0 a level's start, Δθ its change; P the shared state of a group of memories; E the width of a head.
"""

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from jaxtyping import Float, Int
from torch import Tensor

from laconic.nested import state as values
from laconic.nested.cms.config import CMSParams
from laconic.nested.cms.forward import require_levels
from laconic.nested.cms.level import start_weight
from laconic.nested.cms.low_rank_updates import add, frobenius_norm, scale
from laconic.nested.hope import layer as hope_layer
from laconic.nested.hope.layer import SelfTitans
from laconic.nested.hope.memories import SelfModifyingMemories
from laconic.nested.hope.model import Hope
from laconic.nested.hope.task_updates import cms_params_of, empty_open_chunk
from laconic.nested.recurrence.chunked_scan import ChunkedMemory
from laconic.nested.recurrence.gated_delta_rule import Gates, PerToken, max_step_within_norm
from laconic.nested.recurrence.memory_cells import MLPStart, Start, materialize
from laconic.nested.recurrence.packing import pack_left
from laconic.nested.state import (
    CMSLevelState,
    FastWeightState,
    LayerState,
    LinearMemoryState,
    LowRankChange,
    MLPMemoryState,
)
from laconic.nested.titans import layer as titans_layer
from laconic.nested.titans.layer import Titans

MEMORY_METRICS_EVERY = 10  # steps between looks at memories, each of which takes a fifth of a small step
GATE_SAMPLE_TOKENS = 16  # tokens whose gates are looked at
LOW_QUANTILE, HIGH_QUANTILE = 0.1, 0.9  # of them and the heads, the quantiles that are told
GUARD_TOLERANCE = 1e-3  # of its bound, within which a state counts as held by the guard
MONITORED_UPDATES, DEAD_LEVEL_THRESHOLD = (
    20,
    1e-6,
)  # updates looked back at; the relative size below which they are none
Metrics = dict[str, Tensor]


def level_chunk_sizes(model: Hope) -> tuple[int, ...]:
    """The chunk of every level of a model, fastest first."""
    return tuple(sorted({C for chunks in model.hope_config.chunk_sizes for C in chunks}))


@torch.no_grad()
def reading_metrics(
    model: Hope,
    before: FastWeightState,
    after: FastWeightState,
    input_ids: Int[Tensor, "B T"],
    row_tokens: Float[Tensor, ""],
    step: int = 0,
) -> Metrics:
    """Means over rows and layers of what a reading did, by name; `tokens` are those read of a row, `row_tokens`.

    Of level N: `levelN_fired` updates a row, `levelN_update` ‖Δθ‖ / ‖theta_0‖ of one of them, from where the level was
    to where it is, `levelN_moved` the same since its start, `levelN_rank` the outer products that hold it, or its rank.
    Of a group of memories, in every tenth `step`, as the last tokens of the first row have it: `_half_life` in tokens
    and `_step`, and both quantiles, `_low` and `_high`; the share of writes that the cap bounds, `_capped`, and of
    steps held back where an erase would overshoot, `_contracted`. `_norm` is ‖P‖ / √E, `_guarded` the share of states
    that stood at the guard's bound at their last boundary. `state_bytes` of a row. Nothing here waits for the device
    token by token.
    """
    found = {"row_tokens": row_tokens, "state_bytes": torch.tensor(values.num_bytes(after) / len(after.position))}
    for i, chunk in enumerate(level_chunk_sizes(model)):
        found |= {f"level{i}_{name}": x for name, x in level_metrics(model, before, after, chunk).items()}
    return found | (memory_metrics(model, after, input_ids) if step % MEMORY_METRICS_EVERY == 0 else {})


def level_metrics(model: Hope, before: FastWeightState, after: FastWeightState, chunk_size: int) -> Metrics:
    """Updates of the levels of that chunk, the size of one, and of all since the start."""
    fired: list[Tensor] = []
    update: list[Tensor] = []
    moved: list[Tensor] = []
    ranks: list[Tensor] = []
    for params, old, new in zip(cms_params_of(model), before.layers, after.layers, strict=True):
        for l, C in enumerate(params.shape.chunk_sizes):
            if chunk_size != C:
                continue
            was, now = require_levels(old)[l], require_levels(new)[l]
            times_fired = (now.num_updates - was.num_updates).float()
            fired.append(times_fired.mean())
            size, far = relative_change_norms(params, l, was, now)
            update.append((size.cpu() / times_fired.clamp(min=1)).mean())
            moved.append(far.mean().cpu())
            ranks.append(torch.tensor([float(change_rank(change)) for change in now.change.values()]).mean())
    found = {"fired": fired, "update": update, "moved": moved, "rank": ranks}
    return {name: torch.stack(of).mean() for name, of in found.items()}


def change_rank(change: LowRankChange | Tensor) -> int:
    """Outer products that a change is held in; dense, what it can have."""
    return change.right.shape[1] if isinstance(change, LowRankChange) else min(change.shape[-2:])


def relative_change_norms(
    params: CMSParams, l: int, before: CMSLevelState, after: CMSLevelState
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """‖Δθ‖ / ‖theta_0‖ of a level over all its maps, since `was` and since its start."""
    names = params.shape.projections
    start = torch.stack([start_weight(params, l, name).square().sum() for name in names]).sum().clamp(min=1e-30)
    steps = [frobenius_norm(add(after.change[name], scale(before.change[name], -1.0))).square() for name in names]
    whole_way = [frobenius_norm(after.change[name]).square() for name in names]
    return (torch.stack(steps).sum(0) / start).sqrt(), (torch.stack(whole_way).sum(0) / start).sqrt()


def memory_metrics(model: Hope, state: FastWeightState, input_ids: Int[Tensor, "B T"]) -> Metrics:
    """Half-life and step of every group of memories, and the norm of every state, over the layers."""
    layers = [dict(part.named_children()).get("memory") for part in model.blocks]
    memories = [layer for layer in layers if isinstance(layer, SelfTitans | Titans)]
    if not memories:
        return {}
    first, few = values.select_rows(state, [0]), input_ids[:1, -GATE_SAMPLE_TOKENS:]
    opened = None if first.open_chunk is None else empty_open_chunk(first.layers, few)
    names = tuple(f"hidden.{n}" for n in range(len(memories)))
    seen = model(model.embed(few), replace(first, open_chunk=opened), want=names, learn=False)
    each: dict[str, list[Tensor]] = {}
    for name, memory, part, layer, now in zip(names, memories, model.blocks, first.layers, state.layers, strict=True):
        x = part.submodule("norm1")(seen.stages[name])
        found = [gate_metrics(group, gates) for group, gates in group_gates(memory, layer, x).items()]
        found += [cap_metrics(memory, layer, x), guard_metrics(memory, now)]
        found += [{f"{own}_norm": size} for own, size in memory_norms(memory, now).items()]
        for told_name, value in (item for part in found for item in part.items()):
            each.setdefault(told_name, []).append(value.double())
    return {name: torch.stack(of).mean() for name, of in each.items()}


def gate_metrics(group: str, gates: Gates) -> Metrics:
    """Half-life in tokens and step, in the middle and at both quantiles."""
    lost = -gates.decay.double().log()
    lives, step = math.log(2) / lost.clamp(min=1e-12), gates.step_size.double()
    found = {f"{group}_half_life": math.log(2) / lost.mean().clamp(min=1e-12), f"{group}_step": step.mean()}
    for name, x in ((f"{group}_half_life", lives), (f"{group}_step", step)):
        found |= {f"{name}_low": x.quantile(LOW_QUANTILE), f"{name}_high": x.quantile(HIGH_QUANTILE)}
    return found


@dataclass(frozen=True)
class CapRecordingMemories(SelfModifyingMemories):
    """The memories of a layer, which note what of their writes the cap bounds."""

    capped_writes: list[tuple[str, Tensor]] = field(default_factory=list[tuple[str, Tensor]])

    def cap_gates(self, gates: Gates, group: str, write_norm: PerToken) -> Gates:
        """The same gates."""
        cap = self.shape.options.max_projection_norm
        if cap and group != "memory":
            self.capped_writes.append(
                (group, (gates.step_size > max_step_within_norm(gates.decay, write_norm, cap)).double())
            )
        return super().cap_gates(gates, group, write_norm)


def cap_metrics(memory: SelfTitans | Titans, layer: LayerState, x: Float[Tensor, "B T D"]) -> Metrics:
    """The shares of writes that the cap bounds, and of steps that are held back where an erase would overshoot."""
    if isinstance(memory, Titans):
        return {}
    heads, q, _ = hope_layer.mix_inputs(memory.params, layer, x, None)
    own, o = hope_layer.build_memories(memory.params, "none"), memory.shape.options
    watched = CapRecordingMemories(own.shape, own.w, own.outer_gradient)
    watched.step_chunk(layer.memory, (heads, q), None)
    found: dict[str, list[Tensor]] = {}
    for group, hit in watched.capped_writes:
        found.setdefault(f"{group}_capped", []).append(hit.mean())
    if o.delta_rule and (o.max_lr > 1 or o.lr_form == "softplus"):
        for group in memory.shape.group_chunk_sizes:
            gates = own.compute_gates(layer.memory, heads, group)
            found[f"{group}_contracted"] = [(gates.step_size >= 1 + gates.decay).double().mean()]
    return {name: torch.stack(of).mean() for name, of in found.items()}


def guard_metrics(memory: SelfTitans | Titans, layer: LayerState) -> Metrics:
    """The share of states, of rows and heads, that the guard holds: a bound a little nearer would have shrunk them."""
    guard = memory.shape.options.max_memory_norm
    if not guard:
        return {}
    nearer, hits = guard * (1 - GUARD_TOLERANCE), list[Tensor]()
    for system, names in memories_with_guard(memory, nearer):
        held = {name: memory_at_boundary(part) for name, part in layer.memory.items()}
        shrunk = system.end_chunks(held, names)
        pairs = [(held[name], shrunk[name]) for name in names]
        both = [(old, new) for pair in pairs for old, new in zip(*map(linear_parts, pair), strict=True)]
        hits += [(new.now - old.now).square().sum((-2, -1)).sqrt() > GUARD_TOLERANCE / 4 * guard for old, new in both]
    name = memory.shape.group_of("memory") if isinstance(memory, SelfTitans) else "memory"
    return {f"{name}_guarded": torch.stack([hit.double().mean() for hit in hits]).mean()}


def memories_with_guard(memory: SelfTitans | Titans, guard: float) -> list[tuple[ChunkedMemory, list[str]]]:
    """The memories that have a guard, with another one."""
    if isinstance(memory, Titans):
        return [
            (titans_layer.build_memory(memory.params, name, "none", guard), [name])
            for name in memory.shape.memory_chunk_sizes
        ]
    own = hope_layer.build_memories(memory.params, "none")
    shape = replace(own.shape, options=own.shape.options.model_copy(update={"max_memory_norm": guard}))
    group = shape.group_of("memory")
    return [(replace(own, shape=shape), [name for name, of in own.state_groups.items() if of == group])]


def memory_at_boundary(part: LinearMemoryState | MLPMemoryState) -> LinearMemoryState | MLPMemoryState:
    """A memory as it was at the last end of a chunk."""
    if isinstance(part, MLPMemoryState):
        return MLPMemoryState(
            replace(part.W1, change=part.W1.boundary_change), replace(part.W2, change=part.W2.boundary_change)
        )
    return replace(part, change=part.boundary_change)


def linear_parts(part: LinearMemoryState | MLPMemoryState) -> tuple[LinearMemoryState, ...]:
    """One, or those of two layers."""
    return (part.W1, part.W2) if isinstance(part, MLPMemoryState) else (part,)


def group_gates(memory: SelfTitans | Titans, layer: LayerState, x: Float[Tensor, "B T D"]) -> dict[str, Gates]:
    """Of every group, as these inputs set them."""
    if isinstance(memory, SelfTitans):
        heads, _, _ = hope_layer.mix_inputs(memory.params, layer, x, None)
        own = hope_layer.build_memories(memory.params, "none")
        return {group: own.compute_gates(layer.memory, heads, group) for group in memory.shape.group_chunk_sizes}
    inputs, _ = titans_layer.compute_gates(memory.params, layer, pack_left(x, None), dict(layer.conv_tails))
    return {"mixer": Gates(inputs[0], inputs[1])}


def memory_norms(memory: SelfTitans | Titans, layer: LayerState) -> Metrics:
    """‖state‖ / √E of every memory: P, Q or M, of two layers the root mean square of theirs; over rows and heads."""
    return {name: memory_norm(state_start(memory, name), part).mean() for name, part in layer.memory.items()}


def state_start(memory: SelfTitans | Titans, name: str) -> Start | MLPStart:
    """What a state is a change of: a trained start, the identity for P (None), zeros for Q."""
    w = memory.params.weights
    if isinstance(memory, Titans) or f"{name}.W1" in w:
        return titans_layer.memory_start(w, name)
    if not memory.shape.adaptive:
        return w["memory.M"]
    return torch.zeros_like(w["memory.M"]) if name.endswith("_own") else None


def memory_norm(start: Start | MLPStart, part: LinearMemoryState | MLPMemoryState) -> Float[Tensor, "B H"]:
    """Frobenius norm over the root of the width."""
    if isinstance(part, MLPMemoryState):
        assert isinstance(start, MLPStart)
        both = [memory_norm(start.W1, part.W1).square(), memory_norm(start.W2, part.W2).square()]
        return torch.stack(both).mean(0).sqrt()
    assert not isinstance(start, MLPStart)
    return materialize(start, part.change).square().sum((-2, -1)).div(part.change.shape[-1]).sqrt()


class DeadLevelMonitor:
    """Which levels still move: a level that does not fire, or whose updates are nothing, is said once."""

    def __init__(self, chunk_sizes: Sequence[int]) -> None:
        self.chunk_sizes = tuple(chunk_sizes)
        self.tokens_without_update = [0.0] * len(self.chunk_sizes)
        self.recent_updates = [deque[tuple[float, float]]() for _ in self.chunk_sizes]
        self.warned: set[int] = set()

    def observe(self, metrics: Mapping[str, float]) -> None:
        """At the numbers of a step, as `told` names them; warns of a dead level."""
        for i, chunk in enumerate(self.chunk_sizes):
            fired = metrics[f"level{i}_fired"]
            self.tokens_without_update[i] = 0.0 if fired else self.tokens_without_update[i] + metrics["row_tokens"]
            last = self.recent_updates[i]
            if fired:
                last.append((metrics[f"level{i}_update"], fired))
            while last and sum(n for _, n in last) - last[0][1] >= MONITORED_UPDATES:
                last.popleft()
            if i not in self.warned and (what := self.diagnose(i)):
                self.warned.add(i)
                warnings.warn(f"cms: level {i} (chunk {chunk}) {what}", stacklevel=2)

    def diagnose(self, i: int) -> str:
        """What is wrong with a level, if anything."""
        if self.tokens_without_update[i] >= 2 * self.chunk_sizes[i]:
            tokens = f"{self.tokens_without_update[i]:.0f} tokens"
            return f"was not updated in {tokens}; read longer rows, carry the state, or take a smaller chunk"
        last = self.recent_updates[i]
        size = median(size for size, _ in last) if last else math.inf
        if sum(n for _, n in last) >= MONITORED_UPDATES and size < DEAD_LEVEL_THRESHOLD:
            return (
                f"moved {size:.0e} per update over {MONITORED_UPDATES} updates; raise its eta, start from a pretrained model, or "
                "grow the levels"
            )
        return ""
