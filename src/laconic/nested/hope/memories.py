"""All memories of a self-modifying layer: what they generate, write and answer between two boundaries.

Nested Learning arXiv:2512.24695, section 8; symbols as in `hope.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.config.nested import OuterGradient, ReadPosition
from laconic.nested.hope.equations import (
    compute_gates,
    dot_value,
    l2_value,
    mlp_memory,
    self_generated_values,
    self_modifying_write,
)
from laconic.nested.hope.hope_shape import SelfTitansShape
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
    MLPStart,
    UpdateRule,
    Vectors,
    apply_start,
    change_for_writes,
    clip_at_boundary,
    materialize,
    mlp_forward,
    read_linear,
    read_mlp,
    scale_state,
    silu_derivative,
    write_mlp,
)
from laconic.nested.state import LinearMemoryState, MLPMemoryState
from laconic.nested.titans.equations import l2_normalize

READ_STATE: dict[str, ReadPosition] = {"token": "before", "boundary": "boundary", "after": "after"}


@dataclass(frozen=True)
class SelfModifyingMemories:
    """All memories of a layer as `read_along` takes them; `w` in the wide type.

    States by name: P of every group under the group's name, Q under `NAME_own`; of an mlp each memory under its own
    name, and P of the gates under `gates`.
    """

    shape: SelfTitansShape
    w: Mapping[str, Tensor]
    outer_gradient: OuterGradient

    @property
    def chunk_sizes(self) -> dict[str, int]:
        """Of each state, that of its group."""
        return {name: self.shape.group_chunk_sizes[group] for name, group in self.state_groups.items()}

    @property
    def state_groups(self) -> dict[str, str]:
        """The group of every state, by its name."""
        o, groups = self.shape.options, self.shape.group_chunk_sizes
        if o.memory_kind == "mlp":
            deep = [name for name in (*self.shape.adaptive, "memory") if name not in ("step", "keep")]
            found = {name: self.shape.group_of(name) for name in deep}
            gated = {"step", "keep"} & set(self.shape.adaptive)
            return found | ({"gates": self.shape.group_of("keep")} if gated else {})
        if not self.shape.adaptive:
            return {"mixer": self.shape.group_of("memory")}
        own = {f"{group}_own": group for group in groups} if o.memory_kind == "affine" else {}
        return {group: group for group in groups} | own

    @property
    def rule(self) -> UpdateRule:
        """How every memory is kept and read."""
        o = self.shape.options
        return UpdateRule(o.decay_target, READ_STATE[o.read_at], self.outer_gradient)

    def step_chunk(
        self, states: MemoryStates, inputs: tuple[Tensor, ...], valid: Tensor | None
    ) -> tuple[Tensor, MemoryStates]:
        """Tokens between two boundaries: generated, written, read."""
        x, q = inputs
        k, v, given = self.generate(states, x)
        if self.shape.options.adaptive_query:
            q = l2_normalize(self.generate_vectors(states, "q", x))
        moved: dict[str, LinearMemoryState | MLPMemoryState] = {}
        if self.shape.options.memory_kind == "mlp":
            y = self.write_mlps(states, moved, k, v, q, given, valid)
        elif self.shape.adaptive:
            y = self.write_shared_linear(states, moved, k, v, q, given, valid)
        else:
            y = self.write_static(states, moved, k, v, q, given[self.shape.group_of("memory")], valid)
        return y, moved

    def generate(self, states: MemoryStates, x: Vectors) -> tuple[Vectors, Vectors, dict[str, Gates]]:
        """Eq. 83,86,94: k = l2(M_k x), v = M_v x, and every group's gates, all from the states at the chunk's start."""
        k, v = l2_normalize(self.generate_vectors(states, "k", x)), self.generate_vectors(states, "v", x)
        return k, v, {group: self.compute_gates(states, x, group) for group in self.shape.group_chunk_sizes}

    def read(self, states: MemoryStates, x: Vectors, q: Vectors) -> Vectors:
        """What the queries read where nothing is written."""
        part, w = states[self.shape.group_of("memory") if self.shape.options.memory_kind != "mlp" else "memory"], self.w
        if self.shape.options.adaptive_query:
            q = l2_normalize(self.generate_vectors(states, "q", x))
        if isinstance(part, MLPMemoryState):
            return read_mlp(MLPStart(w["memory.W1"], w["memory.W2"]), part, q, self.rule)
        M, affine = w["memory.M"], self.shape.options.memory_kind == "affine"
        if not self.shape.adaptive:
            return (q if affine else 0) + read_linear(M, part, q, self.rule)
        y, Q = read_linear(None, part, q, self.rule) @ M.mT, states.get(f"{self.shape.group_of('memory')}_own")
        return y + read_linear(None, Q, q, self.rule) if isinstance(Q, LinearMemoryState) else y

    def boundary_change(self, states: MemoryStates, state: str) -> Float[Tensor, "B H O I"]:
        """Of a linear state at the boundary, as what is generated sees it."""
        part = states[state]
        assert isinstance(part, LinearMemoryState)
        return change_for_writes(part, self.rule)

    def generate_vectors(self, states: MemoryStates, name: str, x: Vectors) -> Vectors:
        """M_□,c x of one memory of vectors."""
        o, adaptive, part = self.shape.options, name in self.shape.adaptive, states.get(name)
        if o.memory_kind == "mlp":
            starts = MLPStart(self.w[f"{name}.W1"], self.w[f"{name}.W2"])
            return (
                mlp_forward(starts, part, x, self.rule).y
                if isinstance(part, MLPMemoryState)
                else mlp_memory(x, *starts)
            )
        group = self.shape.group_of(name)
        p = self_generated_values(x, self.boundary_change(states, group)) if adaptive else x
        y = p @ self.w[f"{name}.M"].mT
        if o.memory_kind == "affine":
            return x + y + (x @ self.boundary_change(states, f"{group}_own").mT if adaptive else 0)
        return y

    def compute_gates(self, states: MemoryStates, x: Vectors, group: str) -> Gates:
        """Of one group; `keep` and `step` are rows times P of the projections."""
        o, p = self.shape.options, {"x": x, "keep": x, "step": x}
        state = "gates" if o.memory_kind == "mlp" else self.shape.group_of("keep")
        for name in ("keep", "step"):
            if name in self.shape.adaptive:
                p[name] = self_generated_values(x, self.boundary_change(states, state))
        found = compute_gates(p, self.w, group, o.max_lr, o.lr_form)
        return found._replace(step_size=limit_step(found.step_size, found.decay)) if o.delta_rule else found

    def cap_gates(self, gates: Gates, group: str, write_norm: PerToken) -> Gates:
        """With the step that the cap leaves for a write of that size, where projections are in the group."""
        o = self.shape.options
        if not o.max_projection_norm or group == "memory":
            return gates
        return gates._replace(step_size=cap_step(gates.step_size, gates.decay, write_norm, o.max_projection_norm))

    def write_value(self, v: Vectors, at_key: Vectors) -> Vectors:
        """u of a write: v̂, or what v̂ differs by from what is at the key."""
        o = self.shape.options
        return dot_value(v) if o.objective == "dot" else l2_value(v, at_key, o.loss_factor)

    def write_static(
        self,
        states: MemoryStates,
        new_states: dict[str, LinearMemoryState | MLPMemoryState],
        k: Vectors,
        v: Vectors,
        q: Vectors,
        gates: Gates,
        valid: Tensor | None,
    ) -> Vectors:
        """Eq. 76-78: the baseline, k = l2(W_k x), v = W_v x and gates static; values are written as they are."""
        o, M, part = self.shape.options, self.w["memory.M"], states["memory"]
        assert isinstance(part, LinearMemoryState)
        at_key = apply_start(M, k) + k @ change_for_writes(part, self.rule).mT
        at_key = k + at_key if o.memory_kind == "affine" else at_key
        y, new_states["memory"] = self_modifying_write(
            M, part, k, self.write_value(v, at_key), q, gates, self.rule, o.delta_rule, valid
        )
        assert y is not None
        return q + y if o.memory_kind == "affine" else y

    def write_shared_linear(
        self,
        states: MemoryStates,
        new_states: dict[str, LinearMemoryState | MLPMemoryState],
        k: Vectors,
        v: Vectors,
        q: Vectors,
        group_gates: Mapping[str, Gates],
        valid: Tensor | None,
    ) -> Vectors:
        """P of every group, and Q; y = M_0 P q, with q + Q q where the memory is affine."""
        o, y, M = self.shape.options, torch.zeros_like(q), self.w["memory.M"]
        for group in self.shape.group_chunk_sizes:
            read = q if group == self.shape.group_of("memory") else None
            P, Q = states[group], states.get(f"{group}_own")
            assert isinstance(P, LinearMemoryState)
            change = change_for_writes(P, self.rule)
            u = self.write_value(
                self_generated_values(v, change, o.gradient_through_values), self_generated_values(k, change)
            )
            size = vector_norm(u - k if o.delta_rule and o.decay_target == "start" else u)
            u_own = None
            if isinstance(Q, LinearMemoryState):
                change = change_for_writes(Q, self.rule)
                value = v + v @ change.mT
                value = value if o.gradient_through_values else value.detach()
                u_own = self.write_value(value, k + k @ change.mT)
                size = vector_norm(torch.stack([size, vector_norm(u_own)], -1))
            own = self.cap_gates(group_gates[group], group, size)
            at, new_states[group] = self_modifying_write(None, P, k, u, read, own, self.rule, o.delta_rule, valid)
            y = y if at is None else y + at @ M.mT
            if isinstance(Q, LinearMemoryState) and u_own is not None:
                zero = torch.zeros_like(M)
                at, new_states[f"{group}_own"] = self_modifying_write(
                    zero, Q, k, u_own, read, own, self.rule, o.delta_rule, valid
                )
                y = y if at is None or read is None else y + read + at
        return y

    def write_mlps(
        self,
        states: MemoryStates,
        new_states: dict[str, LinearMemoryState | MLPMemoryState],
        k: Vectors,
        v: Vectors,
        q: Vectors,
        group_gates: Mapping[str, Gates],
        valid: Tensor | None,
    ) -> Vectors:
        """Every memory its own two layers, the gates' rows one P."""
        o, y = self.shape.options, q
        for name, group in self.state_groups.items():
            part, gates = states[name], group_gates[group]
            if isinstance(part, LinearMemoryState):
                change = change_for_writes(part, self.rule)
                u = self.write_value(
                    self_generated_values(v, change, o.gradient_through_values), self_generated_values(k, change)
                )
                size = vector_norm(u - k if o.delta_rule and o.decay_target == "start" else u)
                own = self.cap_gates(gates, group, size)
                _, new_states[name] = self_modifying_write(None, part, k, u, None, own, self.rule, o.delta_rule, valid)
                continue
            value = self.generate_vectors(states, name, v) if self.shape.adaptive else v
            value = value if o.gradient_through_values else value.detach()
            read = q if name == "memory" else None
            at, new_states[name] = self.write_one_mlp(name, group, part, k, value, read, gates, valid)
            y = y if at is None else at
        return y

    def write_one_mlp(
        self,
        name: str,
        group: str,
        state: MLPMemoryState,
        k: Vectors,
        v: Vectors,
        q: Vectors | None,
        gates: Gates,
        valid: Tensor | None,
    ) -> tuple[Vectors | None, MLPMemoryState]:
        """One memory of two layers: W2 erases along k, W1 along its own input h, by no more than what is there."""
        o, starts = self.shape.options, MLPStart(self.w[f"{name}.W1"], self.w[f"{name}.W2"])
        inner = mlp_forward(starts, state, k, self.rule)
        e = -self.write_value(v, inner.y)
        erase_inner, to_start = o.delta_rule and o.inner_delta_rule, o.decay_target == "start"
        d, long = (e @ inner.W1) * silu_derivative(inner.a), vector_norm(inner.h)
        size = vector_norm(d + apply_start(starts.W2, k) if o.delta_rule and to_start else d)
        first = self.cap_gates(gates, group, size)
        size = vector_norm(e) + (vector_norm(apply_start(starts.W1, inner.h)) if erase_inner and to_start else 0)
        outer = self.cap_gates(gates, group, size * long)
        most = outer.decay / long.square().clamp(min=1e-12)
        return write_mlp(
            starts,
            state,
            k,
            e,
            inner,
            q,
            first,
            self.rule,
            gates_W1=outer,
            erase=first.step_size if o.delta_rule else None,
            erase_W1=torch.minimum(outer.step_size, most) if erase_inner else None,
            valid=valid,
        )

    def end_chunks(self, states: MemoryStates, names: list[str]) -> MemoryStates:
        """Ends of chunks: what is read is guarded, P and Q together, and all are what the next chunk is made from."""
        guarded = self.shape.group_of("memory")
        found: dict[str, LinearMemoryState | MLPMemoryState] = {}
        for name in names:
            part = states[name]
            radius = self.shape.options.max_memory_norm or None if self.state_groups[name] == guarded else None
            if isinstance(part, MLPMemoryState):
                W1, W2 = self.w[f"{name}.W1"], self.w[f"{name}.W2"]
                found[name] = MLPMemoryState(
                    clip_at_boundary(W1, part.W1, radius, self.rule), clip_at_boundary(W2, part.W2, radius, self.rule)
                )
            elif radius is None:
                found[name] = replace(part, boundary_change=part.change)
            elif not self.shape.adaptive:
                found[name] = clip_at_boundary(self.w["memory.M"], part, radius, self.rule)
            else:
                found[name] = scale_state(
                    self.linear_start(name), part, self.guard_factor(states, name, radius), self.rule
                )
        return found

    def linear_start(self, name: str) -> Float[Tensor, "H E E"] | None:
        """What P and Q start from, the identity and zero."""
        return torch.zeros_like(self.w["memory.M"]) if name.endswith("_own") else None

    def guard_factor(self, memory_states: MemoryStates, name: str, max_norm: float) -> Float[Tensor, "B H 1 1"]:
        """What the guard leaves of P, and of Q beside it."""
        group = name.removesuffix("_own")
        states: list[Tensor] = []
        for other in (group, f"{group}_own"):
            part = memory_states.get(other)
            if isinstance(part, LinearMemoryState):
                to_start = self.rule.decay_to == "start"
                states.append(part.change if to_start else materialize(self.linear_start(other), part.change))
        return norm_clip_factor(max_norm, *states)
