"""Memories that are written while they are read: one matrix or two layers, from boundary to boundary of their chunks.

Titans arXiv:2501.00663 (12 to 18), Nested Learning arXiv:2512.24695 (88 to 93). A memory is its trained start plus the
change that `core/state.py` holds; what a chunk writes is taken from the memory at the chunk's first token.

Symbols: k keys, v values, q queries; e error at the output of a memory, d the same before its inner layer's σ = SiLU.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.config.nested import OuterGradient, ReadPosition
from laconic.nested import state as values
from laconic.nested.recurrence.gated_delta_rule import Gates, PerToken, chunk_gated_delta_rule, norm_clip_factor
from laconic.nested.state import LinearMemoryState, MLPMemoryState

MemoryStates = Mapping[str, LinearMemoryState | MLPMemoryState]
Start = Float[Tensor, "H O I"] | None  # None is the identity
Vectors = Float[Tensor, "B H T E"]


class UpdateRule(NamedTuple):
    """How a memory is kept and read: what it decays to, which state a query meets, and what flows through a write."""

    decay_to: Literal["zero", "start"] = "zero"
    read: ReadPosition = "after"
    outer_gradient: OuterGradient = "full"


def zero_state(B: int, shape: tuple[int, ...], momentum: bool, like: Tensor) -> LinearMemoryState:
    """No change yet, in the wide type of `like` and on its device."""
    zero = torch.zeros(B, *shape, device=like.device, dtype=like.dtype)
    return LinearMemoryState(zero, zero, zero if momentum else None, torch.zeros(B, dtype=torch.long))


def apply_start(start: Start, x: Float[Tensor, "B H T I"]) -> Float[Tensor, "B H T O"]:
    """The start applied to every vector."""
    return x if start is None else x @ start.mT


def materialize(start: Start, change: Tensor) -> Float[Tensor, "B H O I"]:
    """The memory: start and change."""
    return change + start_matrix(start, change)


def start_matrix(start: Start, like: Tensor) -> Float[Tensor, "*H O I"]:
    """The start as it stands in the memory."""
    return torch.eye(like.shape[-1], device=like.device, dtype=like.dtype) if start is None else start


def change_for_writes(m: LinearMemoryState, rule: UpdateRule) -> Tensor:
    """The change at the boundary as what is written sees it: a constant, or with its gradient."""
    return m.boundary_change.detach() if rule.outer_gradient in ("first_order", "none") else m.boundary_change


def write_linear(
    start: Start,
    m: LinearMemoryState,
    key: Float[Tensor, "B H T I"],
    u: Float[Tensor, "B H T O"],
    q: Float[Tensor, "B H T I"] | None,
    gates: Gates,
    rule: UpdateRule,
    *,
    erase: PerToken | None = None,
    valid: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B H T O"] | None, LinearMemoryState]:
    """What the queries read from one matrix while the tokens are written into it, and the matrix after them."""
    base = start
    if rule.outer_gradient == "none":
        m, key, u, base = values.detach(m), key.detach(), u.detach(), None if start is None else start.detach()
        gates = Gates(*(None if x is None else x.detach() for x in gates))  # pyright: ignore[reportArgumentType]
        erase = None if erase is None else erase.detach()
    to_start = rule.decay_to == "start"
    asked = None if rule.read == "boundary" else q
    found = chunk_gated_delta_rule(
        m.change if to_start else materialize(base, m.change),
        key,
        u,
        asked,
        gates,
        erase=erase,
        N=m.momentum,
        anchor=apply_start(base, key) if to_start and erase is not None else None,
        valid=valid,
        read="before" if rule.read == "before" else "after",
    )
    now = found.S if to_start else found.S - start_matrix(base, m.change)
    if q is None:
        return None, replace(m, change=now, momentum=found.N)
    if rule.read == "boundary":
        y = apply_start(start, q) + q @ m.boundary_change.mT
    elif found.Y is not None and to_start:
        y = found.Y + apply_start(start, q)
    else:
        y = cast(Tensor, found.Y)
        if rule.outer_gradient == "none" and start is not None:  # adds 0, and the gradient of the start's direct use
            direct = apply_start(start, q.detach())
            y = y + (direct - direct.detach())
    return y, replace(m, change=now, momentum=found.N)


def read_linear(
    start: Start, m: LinearMemoryState, q: Float[Tensor, "B H T I"], rule: UpdateRule
) -> Float[Tensor, "B H T O"]:
    """What the queries read where nothing is written."""
    return apply_start(start, q) + q @ (m.boundary_change if rule.read == "boundary" else m.change).mT


class MLPStart(NamedTuple):
    """The trained starts of a memory of two layers."""

    W1: Float[Tensor, "H E F"]
    W2: Float[Tensor, "H F E"]


class MLPActivations(NamedTuple):
    """What a two-layer memory makes of keys at the boundary: inner input, inner output, output, and its matrices."""

    a: Float[Tensor, "B H T F"]
    h: Float[Tensor, "B H T F"]
    y: Vectors
    W1: Float[Tensor, "B H E F"]


def mlp_forward(starts: MLPStart, m: MLPMemoryState, x: Vectors, rule: UpdateRule) -> MLPActivations:
    """x + W1 σ(W2 x) from the state at the boundary."""
    W1, W2 = (
        materialize(starts.W1, change_for_writes(m.W1, rule)),
        materialize(starts.W2, change_for_writes(m.W2, rule)),
    )
    a = x @ W2.mT
    h = torch.nn.functional.silu(a)
    return MLPActivations(a, h, x + h @ W1.mT, W1)


def silu_derivative(a: Tensor) -> Tensor:
    """σ'."""
    s = a.sigmoid()
    return s * (1 + a * (1 - s))


def write_mlp(
    starts: MLPStart,
    m: MLPMemoryState,
    k: Vectors,
    e: Vectors,
    activations: MLPActivations,
    q: Vectors | None,
    gates: Gates,
    rule: UpdateRule,
    *,
    gates_W1: Gates | None = None,
    erase: PerToken | None = None,
    erase_W1: PerToken | None = None,
    valid: Bool[Tensor, "B T"] | None = None,
) -> tuple[Vectors | None, MLPMemoryState]:
    """The same for two layers: the gradients at the boundary are -d kᵀ and -e hᵀ, each of rank one.

    `erase` acts on W2 along k, `erase_inner` on W1 along h; `outer_gates` are W1's where they are its own.
    """
    d = (e @ activations.W1) * silu_derivative(activations.a)
    z, W2 = write_linear(starts.W2, m.W2, k, -d, q, gates, rule, erase=erase, valid=valid)
    h = None if z is None else torch.nn.functional.silu(z)
    y, W1 = write_linear(starts.W1, m.W1, activations.h, -e, h, gates_W1 or gates, rule, erase=erase_W1, valid=valid)
    return (None if y is None or q is None else q + y), MLPMemoryState(W1, W2)


def read_mlp(starts: MLPStart, m: MLPMemoryState, q: Vectors, rule: UpdateRule) -> Vectors:
    """What the queries read from two layers where nothing is written."""
    return q + read_linear(starts.W1, m.W1, torch.nn.functional.silu(read_linear(starts.W2, m.W2, q, rule)), rule)


def clip_at_boundary(start: Start, m: LinearMemoryState, max_norm: float | None, rule: UpdateRule) -> LinearMemoryState:
    """A matrix at its boundary: within the guard, and the one that the next chunk is written from."""
    if max_norm is None:
        return replace(m, boundary_change=m.change)
    return scale_state(
        start,
        m,
        norm_clip_factor(max_norm, m.change if rule.decay_to == "start" else materialize(start, m.change)),
        rule,
    )


def scale_state(
    start: Start, m: LinearMemoryState, factor: Float[Tensor, "B H 1 1"], rule: UpdateRule
) -> LinearMemoryState:
    """That share of the state, of its change where it decays to its start, as the next chunk is written from it."""
    now = m.change * factor
    if rule.decay_to == "zero":
        now = materialize(start, m.change) * factor - start_matrix(start, now)
    return replace(m, change=now, boundary_change=now)
