"""A self-modifying layer token by token, every memory stored as it is: Nested Learning arXiv:2512.24695 (83 to 96).

Nothing here knows that memories share a matrix. Beside the paper's memories there are two that only bound norms: one
that starts at the identity, P, and for affine memories one that starts at 0, Q. Vectors are columns [B, H, E, 1].
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.nested.hope.memories import SelfTitansShape
from laconic.nested.recurrence.gated_delta_rule import (
    cap_step,
    decay_gate,
    limit_step,
    norm_clip_factor,
    vector_norm,
)
from laconic.nested.recurrence.memory_cells import l2_normalize, silu_derivative


class ExplicitMemory(NamedTuple):
    """One memory: its start, current value, value at its chunk's start, and momentum of its writes."""

    form: str
    group: str
    start: list[Tensor]
    now: list[Tensor]
    first: list[Tensor]
    momentum: list[Tensor]


class MatrixWrite(NamedTuple):
    """A write into one matrix at one token: key, value, and step sizes of the write and the erasure."""

    key: Tensor
    u: Tensor
    step: Tensor
    erase: Tensor


Memories = dict[str, ExplicitMemory]
GroupGates = dict[str, tuple[Tensor, ...]]


def apply_memory(form: str, Ms: list[Tensor], z: Tensor) -> Tensor:
    """Return M z, z + M z or z + W1 σ(W2 z)."""
    if form == "mlp":
        return z + Ms[0] @ F.silu(Ms[1] @ z)
    return Ms[0] @ z + (z if form == "affine" else 0)


def build_memories(shape: SelfTitansShape, w: Mapping[str, Tensor], B: int) -> Memories:
    """Return all memories at their starts, the static ones too."""
    o, memories = shape.options, Memories()
    for name in ("k", "v", "memory", *(("q",) if o.adaptive_query else ())):
        starts = [w[f"{name}.W1"], w[f"{name}.W2"]] if o.memory_kind == "mlp" else [w[f"{name}.M"]]
        memories[name] = build_memory(o.memory_kind, shape.group_of(name), starts, B)
    for group in shape.group_chunk_sizes:
        for name in ("keep", "step"):
            row = [w[f"{name}.{group}.weight"][:, None]]
            memories[f"{name}.{group}"] = build_memory("linear", shape.group_of(name), row, B)
        like = w["memory.W1" if o.memory_kind == "mlp" else "memory.M"]
        eye = torch.eye(shape.head_dim, dtype=like.dtype).expand(shape.num_heads, -1, -1)
        memories[f"P.{group}"] = build_memory("linear", group, [eye], B)
        memories[f"Q.{group}"] = build_memory("affine", group, [torch.zeros_like(eye)], B)
    return memories


def build_memory(form: str, group: str, starts: list[Tensor], B: int) -> ExplicitMemory:
    """Return one memory for every row of a batch."""
    starts = [x.expand(B, *x.shape) for x in starts]
    return ExplicitMemory(form, group, starts, starts, starts, [torch.zeros_like(x) for x in starts])


def recurrent_self_titans(shape: SelfTitansShape, w: Mapping[str, Tensor], x: Tensor, q: Tensor) -> Tensor:
    """Return what the memory answers from its start; `x` are the inputs of the heads, `q` static queries."""
    o, memories, outputs = shape.options, build_memories(shape, w, len(x)), list[Tensor]()
    for t in range(x.shape[2]):
        sizes = shape.group_chunk_sizes
        memories = {
            name: end_chunk(shape, memories, name) if t and t % sizes.get(m.group, 1) == 0 else m
            for name, m in memories.items()
        }
        z = x[:, :, t, :, None]
        k = unit(generate(shape, memories["k"], "k", z))
        v = generate(shape, memories["v"], "v", z)
        query = unit(generate(shape, memories["q"], "q", z)) if o.adaptive_query else q[:, :, t, :, None]
        gates = {group: compute_gates(shape, memories, w, group, z) for group in sizes}
        before = memories
        memories = {name: write(shape, before, name, k, v, gates) for name in before}
        m, old = memories["memory"], before["memory"]
        Ms = {"token": old.now, "boundary": old.first, "after": m.now}[o.read_at]
        outputs.append(apply_memory(m.form, Ms, query)[..., 0])
    return torch.stack(outputs, 2)


def unit(x: Tensor) -> Tensor:
    """Scale a column to length 1."""
    return l2_normalize(x[..., 0])[..., None]


def generate(shape: SelfTitansShape, m: ExplicitMemory, name: str, z: Tensor) -> Tensor:
    """Return M_□ z at the chunk's start, or at its trained start if □ is static."""
    return apply_memory(m.form, m.first if name.partition(".")[0] in shape.adaptive else m.start, z)


def compute_gates(
    shape: SelfTitansShape, memories: Memories, w: Mapping[str, Tensor], group: str, z: Tensor
) -> tuple[Tensor, ...]:
    """Return decay, step size and momentum [B, H, 1] of one group at one token."""
    o, a = shape.options, dict[str, Tensor]()
    for name in ("keep", "step"):
        row = generate(shape, memories[f"{name}.{group}"], f"{name}.{group}", z)
        a[name] = row[..., 0] + w[f"{name}.{group}.bias"][:, None]
    decay, step = decay_gate(a["keep"]), o.max_lr * a["step"].sigmoid()
    momentum = torch.zeros_like(decay)
    if o.momentum:
        row = w[f"momentum.{group}.weight"][:, None] @ z
        momentum = decay_gate(row[..., 0] + w[f"momentum.{group}.bias"][:, None])
    return decay, limit_step(step, decay) if o.delta_rule else step, momentum


def write(
    shape: SelfTitansShape, memories: Memories, name: str, k: Tensor, v: Tensor, gates: GroupGates
) -> ExplicitMemory:
    """Return one memory after one token."""
    m, o = memories[name], shape.options
    if m.group not in gates:
        return m
    decay, _, momentum = gates[m.group]
    now, momenta = list[Tensor](), list[Tensor]()
    writes = matrix_writes(shape, memories, name, k, v, gates)
    for M, N, start, one in zip(m.now, m.momentum, m.start, writes, strict=True):
        new = decay[..., None] * M
        if o.decay_target == "start":
            new = new + (1 - decay[..., None]) * start
        if o.delta_rule:
            new = new - one.erase[..., None] * (M @ one.key) @ one.key.mT
        N_t = momentum[..., None] * N + one.step[..., None] * one.u @ one.key.mT
        now.append(new + N_t)
        momenta.append(N_t)
    return m._replace(now=now, momentum=momenta)


def matrix_writes(
    shape: SelfTitansShape, memories: Memories, name: str, k: Tensor, v: Tensor, gates: GroupGates
) -> list[MatrixWrite]:
    """Return the write into each matrix of a memory, from its state at the chunk's start."""
    m, o = memories[name], shape.options
    decay, step, _ = gates[m.group]
    u = write_value(shape, memories, m, k, v)
    to_start = o.delta_rule and o.decay_target == "start"
    max_norm = o.max_projection_norm or None if m.group != "memory" else None
    if m.form == "mlp":
        W1, W2 = m.first
        a = W2 @ k
        h, d = F.silu(a), (W1.mT @ -u) * silu_derivative(a)
        norm_1 = norm(u) + (norm(m.start[0] @ h) if to_start else 0)
        norm_2 = norm(-d - m.start[1] @ k if to_start else -d)
        s1 = step if max_norm is None else cap_step(step, decay, norm_1 * norm(h), max_norm)
        s2 = step if max_norm is None else cap_step(step, decay, norm_2, max_norm)
        max_erase = decay / norm(h).square().clamp(min=1e-12)
        return [MatrixWrite(h, u, s1, torch.minimum(s1, max_erase)), MatrixWrite(k, -d, s2, s2)]
    if max_norm is not None and shape.adaptive:
        P, Q = memories[f"P.{m.group}"], memories[f"Q.{m.group}"]
        size = write_value(shape, memories, P, k, v) - (k if to_start else 0)
        if o.memory_kind == "affine":
            size = torch.cat([size, write_value(shape, memories, Q, k, v)], -2)
        step = cap_step(step, decay, norm(size), max_norm)
    return [MatrixWrite(k, u, step, step)]


def norm(x: Tensor) -> Tensor:
    """Return the norm [B, H, 1] of columns."""
    return vector_norm(x.mT)


def write_value(shape: SelfTitansShape, memories: Memories, m: ExplicitMemory, k: Tensor, v: Tensor) -> Tensor:
    """Return u: the memory's own value, or its difference from what is stored at the key."""
    o = shape.options
    value = apply_memory(m.form, m.first, v) if shape.adaptive else v
    return value if o.objective == "dot" else value - apply_memory(m.form, m.first, k)


def end_chunk(shape: SelfTitansShape, memories: Memories, name: str) -> ExplicitMemory:
    """Return a memory at its boundary, with its norm clipped."""
    clipped = clip_norms(shape, memories, name)
    return memories[name]._replace(now=clipped, first=clipped)


def clip_norms(shape: SelfTitansShape, memories: Memories, name: str) -> list[Tensor]:
    """Clip the matrices of a memory in the group of the memory that is read."""
    m, o = memories[name], shape.options
    if not o.max_memory_norm or m.group != shape.group_of("memory"):
        return m.now
    to_start = o.decay_target == "start"
    measured = [m] if m.form == "mlp" or not shape.adaptive else [memories[f"P.{m.group}"]]
    if m.form != "mlp" and shape.adaptive and o.memory_kind == "affine":
        measured.append(memories[f"Q.{m.group}"])
    clipped: list[Tensor] = []
    for n, (M, start) in enumerate(zip(m.now, m.start, strict=True)):
        states = [x.now[n] - x.start[n] if to_start else x.now[n] for x in measured]
        factor = norm_clip_factor(o.max_memory_norm, *states)
        clipped.append(start + factor * (M - start) if to_start else factor * M)
    return clipped
