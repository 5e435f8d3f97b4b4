"""The memories of a self-modifying layer: what they generate, write and read between two chunk boundaries.

Nested Learning arXiv:2512.24695, section 8; symbols as in `equations.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.config.nested import OuterGradient, ReadPosition, SelfModifyingOptions
from laconic.nested.hope.equations import compute_gates, dot_value, l2_value, mlp_memory, self_generated_values
from laconic.nested.recurrence.gated_delta_rule import (
    Gates,
    PerToken,
    cap_step,
    limit_step,
    norm_clip_factor,
    vector_norm,
)
from laconic.nested.recurrence.memory_cells import (
    MemoryStates,
    MLPGates,
    MLPStart,
    Start,
    UpdateRule,
    Vectors,
    apply_start,
    change_for_writes,
    clip_memory_at_boundary,
    l2_normalize,
    materialize,
    mlp_forward,
    read_linear,
    read_mlp,
    scale_state,
    silu_derivative,
    write_linear,
    write_mlp,
)
from laconic.nested.state import LinearMemoryState, MemoryState, MLPMemoryState

READ_POSITIONS: dict[str, ReadPosition] = {"token": "before", "boundary": "boundary", "after": "after"}


@dataclass(frozen=True)
class SelfTitansShape:
    """Width, heads, head width and options of a self-modifying layer."""

    width: int
    num_heads: int
    head_dim: int
    options: SelfModifyingOptions

    @property
    def label(self) -> str:
        C = self.options.memory_chunk_size
        return f"hope of width {self.width} and {self.num_heads} heads of {self.head_dim} in chunks of {C}; "

    @cached_property
    def adaptive(self) -> tuple[str, ...]:
        return self.options.adaptive_names

    @property
    def group_chunk_sizes(self) -> dict[str, int]:
        """Chunk size of each group of memories, by the name of the group."""
        o = self.options
        if o.gate_groups == 1:
            return {"shared": o.memory_chunk_size}
        return {"memory": o.memory_chunk_size} | ({"projections": o.projection_chunk_size} if self.adaptive else {})

    def group_of(self, name: str) -> str:
        if self.options.gate_groups == 1:
            return "shared"
        return "memory" if name == "memory" else "projections"

    @property
    def state_groups(self) -> dict[str, str]:
        o, groups = self.options, self.group_chunk_sizes
        if o.memory_kind == "mlp":
            names = [name for name in (*self.adaptive, "memory") if name not in ("step", "keep")]
            states = {name: self.group_of(name) for name in names}
            has_adaptive_gates = bool({"step", "keep"} & set(self.adaptive))
            return states | ({"gates": self.group_of("keep")} if has_adaptive_gates else {})
        if not self.adaptive:
            return {"memory": self.group_of("memory")}
        offsets = {f"{group}_own": group for group in groups} if o.memory_kind == "affine" else {}
        return {group: group for group in groups} | offsets


class SelfTitansParams(NamedTuple):
    """Shape and trained weights of a self-modifying layer, by name."""

    shape: SelfTitansShape
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class SelfModifyingMemories:
    """All memories of a layer, as a `ChunkedMemory`.

    States by name: P of every group under the group's name and Q under `GROUP_own`. With MLP memories, each memory has
    a state under its own name, and P of the gates is under `gates`.
    Weights are in the accumulation type.
    """

    shape: SelfTitansShape
    w: Mapping[str, Tensor]
    outer_gradient: OuterGradient

    @property
    def chunk_sizes(self) -> dict[str, int]:
        return {name: self.shape.group_chunk_sizes[group] for name, group in self.shape.state_groups.items()}

    @property
    def rule(self) -> UpdateRule:
        o = self.shape.options
        return UpdateRule(o.decay_target, READ_POSITIONS[o.read_at], self.outer_gradient)

    def step_chunk(
        self, states: MemoryStates, inputs: tuple[Tensor, ...], valid: Tensor | None
    ) -> tuple[Tensor, MemoryStates]:
        """Generate, write and read tokens (inputs of the heads, static queries) that no chunk boundary separates."""
        x, q = inputs
        k, v, group_gates = self.generate(states, x)
        group_gates = {group: gates._replace(valid=valid) for group, gates in group_gates.items()}
        if self.shape.options.adaptive_query:
            q = l2_normalize(self.generate_vectors(states, "q", x))
        if self.shape.options.memory_kind == "mlp":
            return self.write_mlps(states, k, v, q, group_gates)
        if self.shape.adaptive:
            return self.write_shared_linear(states, k, v, q, group_gates)
        return self.write_static(states, k, v, q, group_gates[self.shape.group_of("memory")])

    def generate(self, states: MemoryStates, x: Vectors) -> tuple[Vectors, Vectors, dict[str, Gates]]:
        """Eq. 83,86,94: k = l2(M_k x), v = M_v x, and every group's gates, all from the states at the chunk's start."""
        k = l2_normalize(self.generate_vectors(states, "k", x))
        v = self.generate_vectors(states, "v", x)
        return k, v, {group: self.compute_gates(states, x, group) for group in self.shape.group_chunk_sizes}

    def read(self, states: MemoryStates, x: Vectors, q: Vectors) -> Vectors:
        is_mlp = self.shape.options.memory_kind == "mlp"
        state = states["memory" if is_mlp else self.shape.group_of("memory")]
        if self.shape.options.adaptive_query:
            q = l2_normalize(self.generate_vectors(states, "q", x))
        if isinstance(state, MLPMemoryState):
            return read_mlp(self.mlp_start("memory"), state, q, self.rule)
        M = self.w["memory.M"]
        if not self.shape.adaptive:
            y = read_linear(M, state, q, self.rule)
            return q + y if self.shape.options.memory_kind == "affine" else y
        y = read_linear(None, state, q, self.rule) @ M.mT
        Q = states.get(f"{self.shape.group_of('memory')}_own")
        return y + read_linear(None, Q, q, self.rule) if isinstance(Q, LinearMemoryState) else y

    def boundary_change(self, states: MemoryStates, name: str) -> Float[Tensor, "B H O I"]:
        """Return the change of a linear state at the chunk's start, from which the chunk is generated."""
        state = states[name]
        assert isinstance(state, LinearMemoryState)
        return change_for_writes(state, self.rule)

    def generate_vectors(self, states: MemoryStates, name: str, x: Vectors) -> Vectors:
        """Return M_□,c x of the memory k, v or q."""
        o = self.shape.options
        is_adaptive = name in self.shape.adaptive
        state = states.get(name)
        if o.memory_kind == "mlp":
            start = self.mlp_start(name)
            is_written = isinstance(state, MLPMemoryState)
            return mlp_forward(start, state, x, self.rule).y if is_written else mlp_memory(x, *start)
        group = self.shape.group_of(name)
        p = self_generated_values(x, self.boundary_change(states, group)) if is_adaptive else x
        y = p @ self.w[f"{name}.M"].mT
        if o.memory_kind == "affine":
            return x + y + (x @ self.boundary_change(states, f"{group}_own").mT if is_adaptive else 0)
        return y

    def compute_gates(self, states: MemoryStates, x: Vectors, group: str) -> Gates:
        """Return the gates of one group; decay and step size are rows times the projections' P."""
        o, p = self.shape.options, {"x": x, "keep": x, "step": x}
        name = "gates" if o.memory_kind == "mlp" else self.shape.group_of("keep")
        for gate in ("keep", "step"):
            if gate in self.shape.adaptive:
                p[gate] = self_generated_values(x, self.boundary_change(states, name))
        gates = compute_gates(p, self.w, group, o.max_lr)
        return gates._replace(step_size=limit_step(gates.step_size, gates.decay)) if o.delta_rule else gates

    def cap_gates(self, gates: Gates, group: str, write_norm: PerToken) -> Gates:
        """Cap the step size for a write of this norm, in a group that has projections."""
        o = self.shape.options
        if not o.max_projection_norm or group == "memory":
            return gates
        return gates._replace(step_size=cap_step(gates.step_size, gates.decay, write_norm, o.max_projection_norm))

    def write_value(self, v: Vectors, at_key: Vectors) -> Vectors:
        """Return u of a write: the value v̂, or its difference from what is stored at the key."""
        return dot_value(v) if self.shape.options.objective == "dot" else l2_value(v, at_key)

    def shared_write_value(self, v: Vectors, k: Vectors, change: Tensor) -> Vectors:
        """Return u of a write into P, whose own values and stored values are P_c v and P_c k; for Q, z + Q_c z."""
        return self.write_value(self_generated_values(v, change), self_generated_values(k, change))

    def shared_write_norm(self, u: Vectors, k: Vectors) -> PerToken:
        """Return the norm of a write into P, without what the erasure of its start removes."""
        o = self.shape.options
        return vector_norm(u - k if o.delta_rule and o.decay_target == "start" else u)

    def self_modifying_write(
        self, start: Start, m: LinearMemoryState, k: Vectors, u: Vectors, q: Vectors | None, gates: Gates
    ) -> tuple[Vectors | None, LinearMemoryState]:
        """Eq. 88,90,96: M_t = M_{t-1}(decay I - step k kᵀ) + step u kᵀ over one chunk, and what the queries read."""
        erase = gates.step_size if self.shape.options.delta_rule else None
        return write_linear(start, m, k, u, q, gates._replace(erase=erase), self.rule)

    def write_static(
        self, states: MemoryStates, k: Vectors, v: Vectors, q: Vectors, gates: Gates
    ) -> tuple[Vectors, MemoryStates]:
        """Eq. 76-78: the baseline, k = l2(W_k x), v = W_v x and gates static; values are written as they are."""
        M = self.w["memory.M"]
        state = states["memory"]
        is_affine = self.shape.options.memory_kind == "affine"
        assert isinstance(state, LinearMemoryState)
        at_key = apply_start(M, k) + k @ change_for_writes(state, self.rule).mT
        u = self.write_value(v, k + at_key if is_affine else at_key)
        y, state = self.self_modifying_write(M, state, k, u, q, gates)
        assert y is not None
        return q + y if is_affine else y, {"memory": state}

    def write_shared_linear(
        self, states: MemoryStates, k: Vectors, v: Vectors, q: Vectors, group_gates: Mapping[str, Gates]
    ) -> tuple[Vectors, MemoryStates]:
        """Write P of every group, and Q; y = M_0 P q, plus q + Q q if the memory is affine."""
        M = self.w["memory.M"]
        y = torch.zeros_like(q)
        new_states: dict[str, MemoryState] = {}
        for group in self.shape.group_chunk_sizes:
            queries = q if group == self.shape.group_of("memory") else None
            own_key = f"{group}_own"
            P, Q = states[group], states.get(own_key)
            assert isinstance(P, LinearMemoryState)
            u = self.shared_write_value(v, k, change_for_writes(P, self.rule))
            write_norm = self.shared_write_norm(u, k)
            self_written = None
            if isinstance(Q, LinearMemoryState):
                self_written = self.shared_write_value(v, k, change_for_writes(Q, self.rule))
                write_norm = vector_norm(torch.stack([write_norm, vector_norm(self_written)], -1))
            gates = self.cap_gates(group_gates[group], group, write_norm)
            output, new_states[group] = self.self_modifying_write(None, P, k, u, queries, gates)
            y = y if output is None else y + output @ M.mT
            if isinstance(Q, LinearMemoryState) and self_written is not None:
                start = torch.zeros_like(M)
                output, new_states[own_key] = self.self_modifying_write(start, Q, k, self_written, queries, gates)
                y = y if output is None else y + q + output
        return y, new_states

    def write_mlps(
        self, states: MemoryStates, k: Vectors, v: Vectors, q: Vectors, group_gates: Mapping[str, Gates]
    ) -> tuple[Vectors, MemoryStates]:
        """Write every memory's two layers, and one P for the rows of the gates."""
        y, new_states = q, dict[str, MemoryState]()
        for name, group in self.shape.state_groups.items():
            state, gates = states[name], group_gates[group]
            if isinstance(state, LinearMemoryState):
                u = self.shared_write_value(v, k, change_for_writes(state, self.rule))
                gates = self.cap_gates(gates, group, self.shared_write_norm(u, k))
                _, new_states[name] = self.self_modifying_write(None, state, k, u, None, gates)
                continue
            value = self.generate_vectors(states, name, v) if self.shape.adaptive else v
            queries = q if name == "memory" else None
            output, new_states[name] = self.write_one_mlp(name, group, state, k, value, queries, gates)
            y = y if output is None else output
        return y, new_states

    def write_one_mlp(
        self, name: str, group: str, state: MLPMemoryState, k: Vectors, v: Vectors, q: Vectors | None, gates: Gates
    ) -> tuple[Vectors | None, MLPMemoryState]:
        """Write one two-layer memory: W2 erases along k, W1 along its own input h, at most what is stored there."""
        o = self.shape.options
        start = self.mlp_start(name)
        inner = mlp_forward(start, state, k, self.rule)
        e = -self.write_value(v, inner.y)
        decays_to_start = o.decay_target == "start"
        d = (e @ inner.W1) * silu_derivative(inner.a)
        h_norm = vector_norm(inner.h)
        write_norm = vector_norm(d + apply_start(start.W2, k) if o.delta_rule and decays_to_start else d)
        gates_W2 = self.cap_gates(gates, group, write_norm)
        write_norm = vector_norm(e)
        if o.delta_rule and decays_to_start:
            write_norm = write_norm + vector_norm(apply_start(start.W1, inner.h))
        gates_W1 = self.cap_gates(gates, group, write_norm * h_norm)
        if o.delta_rule:
            max_erase = gates_W1.decay / h_norm.square().clamp(min=1e-12)
            gates_W1 = gates_W1._replace(erase=torch.minimum(gates_W1.step_size, max_erase))
            gates_W2 = gates_W2._replace(erase=gates_W2.step_size)
        return write_mlp(start, state, k, e, inner, q, MLPGates(gates_W1, gates_W2), self.rule)

    def end_chunks(self, states: MemoryStates, names: list[str]) -> MemoryStates:
        """End chunks: clip the norm of the memory that is read (P and Q together), and compute next writes from it."""
        ended: dict[str, MemoryState] = {}
        for name in names:
            state = states[name]
            is_read = self.shape.state_groups[name] == self.shape.group_of("memory")
            max_norm = self.shape.options.max_memory_norm or None if is_read else None
            if isinstance(state, MLPMemoryState):
                ended[name] = clip_memory_at_boundary(self.mlp_start(name), state, max_norm, self.rule)
            elif max_norm is None:
                ended[name] = replace(state, boundary_change=state.change)
            else:
                factor = self.guard_factor(states, name, max_norm)
                ended[name] = scale_state(self.linear_start(name), state, factor, self.rule)
        return ended

    def mlp_start(self, name: str) -> MLPStart:
        return MLPStart(self.w[f"{name}.W1"], self.w[f"{name}.W2"])

    def linear_start(self, name: str) -> Float[Tensor, "H E E"] | None:
        """Return the start of P (the identity, None), of Q (zero), or of the memory alone if nothing else adapts."""
        if not self.shape.adaptive:
            return self.w["memory.M"]
        return torch.zeros_like(self.w["memory.M"]) if name.endswith("_own") else None

    def guard_factor(self, states: MemoryStates, name: str, max_norm: float) -> Float[Tensor, "B H 1 1"]:
        """Return the factor that brings P, and Q beside it, within the largest norm."""
        group = name.removesuffix("_own")
        parts = {part: states[part] for part in (group, f"{group}_own") if part in states}
        changes = {part: state.change for part, state in parts.items() if isinstance(state, LinearMemoryState)}
        if self.rule.decay_to == "zero":
            changes = {part: materialize(self.linear_start(part), change) for part, change in changes.items()}
        return norm_clip_factor(max_norm, *changes.values())
