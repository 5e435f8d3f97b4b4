"""All memories of a self-modifying layer: what they generate, write and answer between two boundaries.

Nested Learning arXiv:2512.24695, section 8; symbols as in `hope.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laconic.core.state import Deep, Matrix
from laconic.methods.delta import Gates, PerToken, capped, contracted, length, within
from laconic.methods.fast_weights import (
    Memory,
    Rule,
    Starts,
    Vectors,
    bounded,
    inside,
    recalled,
    recalled_deep,
    shrunk,
    slope,
    source,
    through,
    whole,
    written_deep,
)
from laconic.methods.hope import dot_value, gates, l2_value, mlp_memory, own_values, self_write
from laconic.methods.hope_shape import Shape
from laconic.methods.learning_settings import Gradient, Read
from laconic.methods.titans import l2

READ: dict[str, Read] = {"token": "before", "boundary": "boundary", "after": "after"}


@dataclass(frozen=True)
class Learner:
    """All memories of a layer as `read_along` takes them; `w` in the wide type.

    States by name: P of every group under the group's name, Q under `NAME_own`; of an mlp each memory under its own
    name, and P of the gates under `gates`.
    """

    shape: Shape
    w: Mapping[str, Tensor]
    gradient: Gradient

    @property
    def chunks(self) -> dict[str, int]:
        """Of each state, that of its group."""
        return {name: self.shape.groups[group] for name, group in self.states.items()}

    @property
    def states(self) -> dict[str, str]:
        """The group of every state, by its name."""
        o, groups = self.shape.options, self.shape.groups
        if o.memory == "mlp":
            deep = [name for name in (*self.shape.adaptive, "memory") if name not in ("step", "keep")]
            found = {name: self.shape.group(name) for name in deep}
            gated = {"step", "keep"} & set(self.shape.adaptive)
            return found | ({"gates": self.shape.group("keep")} if gated else {})
        if not self.shape.adaptive:
            return {"memory": self.shape.group("memory")}
        own = {f"{group}_own": group for group in groups} if o.memory == "affine" else {}
        return {group: group for group in groups} | own

    @property
    def rule(self) -> Rule:
        """How every memory is kept and read."""
        o = self.shape.options
        return Rule(o.decay_to, READ[o.read], self.gradient)

    def piece(self, memory: Memory, inputs: tuple[Tensor, ...], live: Tensor | None) -> tuple[Tensor, Memory]:
        """Tokens between two boundaries: generated, written, read."""
        x, q = inputs
        k, v, given = self.generate(memory, x)
        if self.shape.options.inner_query:
            q = l2(self.made(memory, "q", x))
        moved: dict[str, Matrix | Deep] = {}
        if self.shape.options.memory == "mlp":
            y = self.write_mlp(memory, moved, k, v, q, given, live)
        elif self.shape.adaptive:
            y = self.write_shared(memory, moved, k, v, q, given, live)
        else:
            y = self.write_static(memory, moved, k, v, q, given[self.shape.group("memory")], live)
        return y, moved

    def generate(self, memory: Memory, x: Vectors) -> tuple[Vectors, Vectors, dict[str, Gates]]:
        """Eq. 83,86,94: k = l2(M_k x), v = M_v x, and every group's gates, all from the states at the chunk's start."""
        k, v = l2(self.made(memory, "k", x)), self.made(memory, "v", x)
        return k, v, {group: self.gates(memory, x, group) for group in self.shape.groups}

    def recall(self, memory: Memory, x: Vectors, q: Vectors) -> Vectors:
        """What the queries read where nothing is written."""
        part, w = memory[self.shape.group("memory") if self.shape.options.memory != "mlp" else "memory"], self.w
        if self.shape.options.inner_query:
            q = l2(self.made(memory, "q", x))
        if isinstance(part, Deep):
            return recalled_deep(Starts(w["memory.W1"], w["memory.W2"]), part, q, self.rule)
        M, affine = w["memory.M"], self.shape.options.memory == "affine"
        if not self.shape.adaptive:
            return (q if affine else 0) + recalled(M, part, q, self.rule)
        y, Q = recalled(None, part, q, self.rule) @ M.mT, memory.get(f"{self.shape.group('memory')}_own")
        return y + recalled(None, Q, q, self.rule) if isinstance(Q, Matrix) else y

    def change(self, memory: Memory, state: str) -> Float[Tensor, "B H O I"]:
        """Of a linear state at the boundary, as what is generated sees it."""
        part = memory[state]
        assert isinstance(part, Matrix)
        return source(part, self.rule)

    def made(self, memory: Memory, name: str, x: Vectors) -> Vectors:
        """M_□,c x of one memory of vectors."""
        o, adaptive, part = self.shape.options, name in self.shape.adaptive, memory.get(name)
        if o.memory == "mlp":
            starts = Starts(self.w[f"{name}.W1"], self.w[f"{name}.W2"])
            return inside(starts, part, x, self.rule).y if isinstance(part, Deep) else mlp_memory(x, *starts)
        group = self.shape.group(name)
        p = own_values(x, self.change(memory, group)) if adaptive else x
        y = p @ self.w[f"{name}.M"].mT
        if o.memory == "affine":
            return x + y + (x @ self.change(memory, f"{group}_own").mT if adaptive else 0)
        return y

    def gates(self, memory: Memory, x: Vectors, group: str) -> Gates:
        """Of one group; `keep` and `step` are rows times P of the projections."""
        o, p = self.shape.options, {"x": x, "keep": x, "step": x}
        state = "gates" if o.memory == "mlp" else self.shape.group("keep")
        for name in ("keep", "step"):
            if name in self.shape.adaptive:
                p[name] = own_values(x, self.change(memory, state))
        found = gates(p, self.w, group, o.step_max, o.step_form)
        return found._replace(step=contracted(found.step, found.keep)) if o.erase else found

    def bounded_gates(self, given: Gates, group: str, size: PerToken) -> Gates:
        """With the step that the cap leaves for a write of that size, where projections are in the group."""
        o = self.shape.options
        if not o.cap or group == "memory":
            return given
        return given._replace(step=capped(given.step, given.keep, size, o.cap))

    def value(self, v: Vectors, at_key: Vectors) -> Vectors:
        """u of a write: v̂, or what v̂ differs by from what is at the key."""
        o = self.shape.options
        return dot_value(v) if o.objective == "dot" else l2_value(v, at_key, o.factor)

    def write_static(
        self,
        memory: Memory,
        moved: dict[str, Matrix | Deep],
        k: Vectors,
        v: Vectors,
        q: Vectors,
        given: Gates,
        live: Tensor | None,
    ) -> Vectors:
        """Eq. 76-78: the baseline, k = l2(W_k x), v = W_v x and gates static; values are written as they are."""
        o, M, part = self.shape.options, self.w["memory.M"], memory["memory"]
        assert isinstance(part, Matrix)
        at_key = through(M, k) + k @ source(part, self.rule).mT
        at_key = k + at_key if o.memory == "affine" else at_key
        y, moved["memory"] = self_write(M, part, k, self.value(v, at_key), q, given, self.rule, o.erase, live)
        assert y is not None
        return q + y if o.memory == "affine" else y

    def write_shared(
        self,
        memory: Memory,
        moved: dict[str, Matrix | Deep],
        k: Vectors,
        v: Vectors,
        q: Vectors,
        given: Mapping[str, Gates],
        live: Tensor | None,
    ) -> Vectors:
        """P of every group, and Q; y = M_0 P q, with q + Q q where the memory is affine."""
        o, y, M = self.shape.options, torch.zeros_like(q), self.w["memory.M"]
        for group in self.shape.groups:
            read = q if group == self.shape.group("memory") else None
            P, Q = memory[group], memory.get(f"{group}_own")
            assert isinstance(P, Matrix)
            change = source(P, self.rule)
            u = self.value(own_values(v, change, o.own_values_gradient), own_values(k, change))
            size = length(u - k if o.erase and o.decay_to == "start" else u)
            u_own = None
            if isinstance(Q, Matrix):
                change = source(Q, self.rule)
                value = v + v @ change.mT
                value = value if o.own_values_gradient else value.detach()
                u_own = self.value(value, k + k @ change.mT)
                size = length(torch.stack([size, length(u_own)], -1))
            own = self.bounded_gates(given[group], group, size)
            at, moved[group] = self_write(None, P, k, u, read, own, self.rule, o.erase, live)
            y = y if at is None else y + at @ M.mT
            if isinstance(Q, Matrix) and u_own is not None:
                zero = torch.zeros_like(M)
                at, moved[f"{group}_own"] = self_write(zero, Q, k, u_own, read, own, self.rule, o.erase, live)
                y = y if at is None or read is None else y + read + at
        return y

    def write_mlp(
        self,
        memory: Memory,
        moved: dict[str, Matrix | Deep],
        k: Vectors,
        v: Vectors,
        q: Vectors,
        given: Mapping[str, Gates],
        live: Tensor | None,
    ) -> Vectors:
        """Every memory its own two layers, the gates' rows one P."""
        o, y = self.shape.options, q
        for name, group in self.states.items():
            part, gates = memory[name], given[group]
            if isinstance(part, Matrix):
                change = source(part, self.rule)
                u = self.value(own_values(v, change, o.own_values_gradient), own_values(k, change))
                size = length(u - k if o.erase and o.decay_to == "start" else u)
                own = self.bounded_gates(gates, group, size)
                _, moved[name] = self_write(None, part, k, u, None, own, self.rule, o.erase, live)
                continue
            value = self.made(memory, name, v) if self.shape.adaptive else v
            value = value if o.own_values_gradient else value.detach()
            read = q if name == "memory" else None
            at, moved[name] = self.write_deep(name, group, part, k, value, read, gates, live)
            y = y if at is None else at
        return y

    def write_deep(
        self,
        name: str,
        group: str,
        part: Deep,
        k: Vectors,
        v: Vectors,
        q: Vectors | None,
        given: Gates,
        live: Tensor | None,
    ) -> tuple[Vectors | None, Deep]:
        """One memory of two layers: W2 erases along k, W1 along its own input h, by no more than what is there."""
        o, starts = self.shape.options, Starts(self.w[f"{name}.W1"], self.w[f"{name}.W2"])
        inner = inside(starts, part, k, self.rule)
        e = -self.value(v, inner.y)
        erase_inner, to_start = o.erase and o.erase_inner, o.decay_to == "start"
        d, long = (e @ inner.W1) * slope(inner.a), length(inner.h)
        size = length(d + through(starts.W2, k) if o.erase and to_start else d)
        first = self.bounded_gates(given, group, size)
        size = length(e) + (length(through(starts.W1, inner.h)) if erase_inner and to_start else 0)
        outer = self.bounded_gates(given, group, size * long)
        most = outer.keep / long.square().clamp(min=1e-12)
        return written_deep(
            starts,
            part,
            k,
            e,
            inner,
            q,
            first,
            self.rule,
            outer_gates=outer,
            erase=first.step if o.erase else None,
            erase_inner=torch.minimum(outer.step, most) if erase_inner else None,
            live=live,
        )

    def closed(self, memory: Memory, names: list[str]) -> Memory:
        """Ends of chunks: what is read is guarded, P and Q together, and all are what the next chunk is made from."""
        guarded = self.shape.group("memory")
        found: dict[str, Matrix | Deep] = {}
        for name in names:
            part = memory[name]
            radius = self.shape.options.guard or None if self.states[name] == guarded else None
            if isinstance(part, Deep):
                W1, W2 = self.w[f"{name}.W1"], self.w[f"{name}.W2"]
                found[name] = Deep(bounded(W1, part.W1, radius, self.rule), bounded(W2, part.W2, radius, self.rule))
            elif radius is None:
                found[name] = replace(part, first=part.now)
            elif not self.shape.adaptive:
                found[name] = bounded(self.w["memory.M"], part, radius, self.rule)
            else:
                found[name] = shrunk(self.linear_start(name), part, self.share(memory, name, radius), self.rule)
        return found

    def linear_start(self, name: str) -> Float[Tensor, "H E E"] | None:
        """What P and Q start from, the identity and zero."""
        return torch.zeros_like(self.w["memory.M"]) if name.endswith("_own") else None

    def share(self, memory: Memory, name: str, radius: float) -> Float[Tensor, "B H 1 1"]:
        """What the guard leaves of P, and of Q beside it."""
        group = name.removesuffix("_own")
        states: list[Tensor] = []
        for other in (group, f"{group}_own"):
            part = memory.get(other)
            if isinstance(part, Matrix):
                to_start = self.rule.decay_to == "start"
                states.append(part.now if to_start else whole(self.linear_start(other), part.now))
        return within(radius, *states)
