"""The definition of a self-modifying layer: every memory held as it is, written token by token.

Nested Learning arXiv:2512.24695 (83 to 96). Nothing here knows that memories share a matrix; beside the paper's there
are two that are only looked at, one that starts at the identity and, where memories are affine, one that starts at 0:
their norms are what the cap and the guard ask for. Vectors are columns [B, H, E, 1].
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.nested.hope.equations import bounded_step_size
from laconic.nested.hope.hope_shape import SelfTitansShape
from laconic.nested.recurrence.gated_delta_rule import cap_step, decay_gate, limit_step, norm_clip_factor, vector_norm
from laconic.nested.recurrence.memory_cells import Vectors, silu_derivative
from laconic.nested.titans.equations import l2_normalize


class ExplicitMemory(NamedTuple):
    """One memory: where it starts, what it is now, at its chunk's start, and the momentum of its writes."""

    form: str
    group: str
    start: list[Tensor]
    now: list[Tensor]
    first: list[Tensor]
    momentum: list[Tensor]


class MatrixWrite(NamedTuple):
    """What goes into one matrix at one token: along which key, what, and how big the step of write and erase is."""

    key: Tensor
    u: Tensor
    step: Tensor
    erase: Tensor


def applied(form: str, Ms: list[Tensor], z: Tensor) -> Tensor:
    """M z, z + M z or z + W1 σ(W2 z)."""
    if form == "mlp":
        return z + Ms[0] @ F.silu(Ms[1] @ z)
    return Ms[0] @ z + (z if form == "affine" else 0)


def memories(shape: SelfTitansShape, w: Mapping[str, Tensor], B: int) -> dict[str, ExplicitMemory]:
    """All of them at their start, the static ones too."""
    o, found = shape.options, dict[str, ExplicitMemory]()
    for name in ("k", "v", "memory", *(("q",) if o.adaptive_query else ())):
        starts = [w[f"{name}.W1"], w[f"{name}.W2"]] if o.memory_kind == "mlp" else [w[f"{name}.M"]]
        found[name] = slow(o.memory_kind, shape.group_of(name), starts, B)
    for group in shape.group_chunk_sizes:
        for name in ("keep", "step"):
            found[f"{name}.{group}"] = slow("linear", shape.group_of(name), [w[f"{name}.{group}.weight"][:, None]], B)
        like = w["memory.W1" if o.memory_kind == "mlp" else "memory.M"]
        eye = torch.eye(shape.head_dim, dtype=like.dtype).expand(shape.num_heads, -1, -1)
        found[f"P.{group}"] = slow("linear", group, [eye], B)
        found[f"Q.{group}"] = slow("affine", group, [torch.zeros_like(eye)], B)
    return found


def slow(form: str, group: str, starts: list[Tensor], B: int) -> ExplicitMemory:
    """One memory for every row of a batch."""
    starts = [x.expand(B, *x.shape) for x in starts]
    return ExplicitMemory(form, group, starts, starts, starts, [torch.zeros_like(x) for x in starts])


def recurrent_self_titans(shape: SelfTitansShape, w: Mapping[str, Tensor], x: Vectors, q: Vectors) -> Vectors:
    """What the memory answers, from the start: `x` the heads' inputs, `q` their static queries."""
    o, held, found = shape.options, memories(shape, w, len(x)), list[Tensor]()
    for t in range(x.shape[2]):
        ended = {name for name, m in held.items() if t and t % shape.group_chunk_sizes.get(m.group, 1) == 0}
        held = {name: closed(shape, held, name) if name in ended else m for name, m in held.items()}
        z = x[:, :, t, :, None]
        k, v = unit(made(shape, held["k"], "k", z)), made(shape, held["v"], "v", z)
        query = unit(made(shape, held["q"], "q", z)) if o.adaptive_query else q[:, :, t, :, None]
        given = {group: gates(shape, held, w, group, z) for group in shape.group_chunk_sizes}
        before = held
        held = {name: written(shape, before, name, k, v, given) for name in before}
        m, old = held["memory"], before["memory"]
        Ms = {"token": old.now, "boundary": old.first, "after": m.now}[o.read_at]
        found.append(applied(m.form, Ms, query)[..., 0])
    return torch.stack(found, 2)


def unit(x: Tensor) -> Tensor:
    """A column of length 1."""
    return l2_normalize(x[..., 0])[..., None]


def made(shape: SelfTitansShape, m: ExplicitMemory, name: str, z: Tensor) -> Tensor:
    """M_□ z at the chunk's start, or as it was trained where □ is static."""
    return applied(m.form, m.first if name.partition(".")[0] in shape.adaptive else m.start, z)


def gates(
    shape: SelfTitansShape, held: dict[str, ExplicitMemory], w: Mapping[str, Tensor], group: str, z: Tensor
) -> tuple[Tensor, ...]:
    """keep, step and momentum [B, H, 1] of one group at one token."""
    o, a = shape.options, dict[str, Tensor]()
    for name in ("keep", "step"):
        row = made(shape, held[f"{name}.{group}"], f"{name}.{group}", z)
        a[name] = row[..., 0] + w[f"{name}.{group}.bias"][:, None]
    keep, step = decay_gate(a["keep"]), bounded_step_size(a["step"], o.max_lr, o.lr_form)
    momentum = torch.zeros_like(keep)
    if o.momentum:
        row = w[f"momentum.{group}.weight"][:, None] @ z
        momentum = decay_gate(row[..., 0] + w[f"momentum.{group}.bias"][:, None])
    return keep, limit_step(step, keep) if o.delta_rule else step, momentum


def written(
    shape: SelfTitansShape,
    held: dict[str, ExplicitMemory],
    name: str,
    k: Tensor,
    v: Tensor,
    given: dict[str, tuple[Tensor, ...]],
) -> ExplicitMemory:
    """One memory after one token."""
    m, o = held[name], shape.options
    if m.group not in given:
        return m
    keep, _, momentum = given[m.group]
    now, kept = list[Tensor](), list[Tensor]()
    for M, N, start, write in zip(m.now, m.momentum, m.start, writes(shape, held, name, k, v, given), strict=True):
        new = keep[..., None] * M
        if o.decay_target == "start":
            new = new + (1 - keep[..., None]) * start
        if o.delta_rule:
            new = new - write.erase[..., None] * (M @ write.key) @ write.key.mT
        N_t = momentum[..., None] * N + write.step[..., None] * write.u @ write.key.mT
        now.append(new + N_t)
        kept.append(N_t)
    return m._replace(now=now, momentum=kept)


def writes(
    shape: SelfTitansShape,
    held: dict[str, ExplicitMemory],
    name: str,
    k: Tensor,
    v: Tensor,
    given: dict[str, tuple[Tensor, ...]],
) -> list[MatrixWrite]:
    """What is written into each matrix of a memory, from its state at the chunk's start."""
    m, o = held[name], shape.options
    keep, step, _ = given[m.group]
    u = values(shape, held, m, k, v)
    to_start, capped_group = (
        o.delta_rule and o.decay_target == "start",
        o.max_projection_norm or None if m.group != "memory" else None,
    )
    if m.form == "mlp":
        W1, W2 = m.first
        a = W2 @ k
        h, d = F.silu(a), (W1.mT @ -u) * silu_derivative(a)
        inner = to_start and o.inner_delta_rule
        sizes = [norm(u) + (norm(m.start[0] @ h) if inner else 0), norm(-d - m.start[1] @ k if to_start else -d)]
        s1 = step if capped_group is None else cap_step(step, keep, sizes[0] * norm(h), capped_group)
        s2 = step if capped_group is None else cap_step(step, keep, sizes[1], capped_group)
        most = keep / norm(h).square().clamp(min=1e-12)
        erase = torch.minimum(s1, most) if o.inner_delta_rule else torch.zeros_like(s1)
        return [MatrixWrite(h, u, s1, erase), MatrixWrite(k, -d, s2, s2)]
    if capped_group is not None and shape.adaptive:
        P, Q = held[f"P.{m.group}"], held[f"Q.{m.group}"]
        size = values(shape, held, P, k, v) - (k if to_start else 0)
        if o.memory_kind == "affine":
            size = torch.cat([size, values(shape, held, Q, k, v)], -2)
        step = cap_step(step, keep, norm(size), capped_group)
    return [MatrixWrite(k, u, step, step)]


def norm(x: Tensor) -> Tensor:
    """[B, H, 1] of columns."""
    return vector_norm(x.mT)


def values(shape: SelfTitansShape, held: dict[str, ExplicitMemory], m: ExplicitMemory, k: Tensor, v: Tensor) -> Tensor:
    """u: the memory's own value, or by how much it is missed."""
    o = shape.options
    own = applied(m.form, m.first, v) if shape.adaptive else v
    if not o.gradient_through_values and m.form == "mlp":
        own = own.detach()
    elif not o.gradient_through_values and shape.adaptive:  # what the start is applied to is cut, never the start
        P, Q = (held[f"{name}.{m.group}"].first[0] for name in "PQ")
        own = m.start[0] @ (P @ v).detach() + ((v + Q @ v).detach() if m.form == "affine" else 0)
    return own if o.objective == "dot" else o.loss_factor * (own - applied(m.form, m.first, k))


def closed(shape: SelfTitansShape, held: dict[str, ExplicitMemory], name: str) -> ExplicitMemory:
    """A memory at its boundary, guarded, and what the next chunk is made from."""
    found = guarded(shape, held, name)
    return held[name]._replace(now=found, first=found)


def guarded(shape: SelfTitansShape, held: dict[str, ExplicitMemory], name: str) -> list[Tensor]:
    """Its matrices within the guard, where the memory that is read is in the group."""
    m, o = held[name], shape.options
    if not o.max_memory_norm or m.group != shape.group_of("memory"):
        return m.now
    to_start = o.decay_target == "start"
    looked = [m] if m.form == "mlp" or not shape.adaptive else [held[f"P.{m.group}"]]
    if m.form != "mlp" and shape.adaptive and o.memory_kind == "affine":
        looked.append(held[f"Q.{m.group}"])
    found: list[Tensor] = []
    for n, (M, start) in enumerate(zip(m.now, m.start, strict=True)):
        states = [x.now[n] - x.start[n] if to_start else x.now[n] for x in looked]
        share = norm_clip_factor(o.max_memory_norm, *states)
        found.append(start + share * (M - start) if to_start else share * M)
    return found
