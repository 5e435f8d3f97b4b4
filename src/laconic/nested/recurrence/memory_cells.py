"""Fast-weight memories of one matrix or two layers, written while they are read, chunk by chunk.

Titans arXiv:2501.00663, Eqs. 12 to 18; Nested Learning arXiv:2512.24695, Eqs. 88 to 93. A memory is its trained start
plus the change that `nested/state.py` holds. A chunk's writes are computed from the memory at its first token.

Symbols: k keys, v values, q queries; e gradient at the output of a memory, d the same before the inner σ = SiLU.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.config.nested import OuterGradient, ReadPosition
from laconic.nested.recurrence.gated_delta_rule import Gates, chunk_gated_delta_rule, norm_clip_factor
from laconic.nested.state import LinearMemoryState, MemoryState, MLPMemoryState

MemoryStates = Mapping[str, MemoryState]
Start = Float[Tensor, "H O I"] | None  # None is the identity
NORM_EPS = 1e-6
Vectors = Float[Tensor, "B H T E"]


class UpdateRule(NamedTuple):
    """How a memory decays, where it is read, and which part of the outer gradient flows through its writes."""

    decay_to: Literal["zero", "start"] = "zero"
    read: ReadPosition = "after"
    outer_gradient: OuterGradient = "full"


def l2_normalize(x: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
    """Scale vectors to length 1; zero stays zero, with a finite gradient."""
    return x * x.square().sum(-1, keepdim=True).clamp(min=1e-12).rsqrt()


def zero_state(B: int, shape: tuple[int, ...], has_momentum: bool, like: Tensor) -> LinearMemoryState:
    """Return the state of a memory that has read nothing, with the type and device of `like`."""
    zero = torch.zeros(B, *shape, device=like.device, dtype=like.dtype)
    return LinearMemoryState(zero, zero, zero if has_momentum else None, torch.zeros(B, dtype=torch.long))


def apply_start(start: Start, x: Float[Tensor, "B H T I"]) -> Float[Tensor, "B H T O"]:
    return x if start is None else x @ start.mT


def materialize(start: Start, change: Tensor) -> Float[Tensor, "B H O I"]:
    return change + start_matrix(start, change)


def start_matrix(start: Start, like: Tensor) -> Float[Tensor, "*H O I"]:
    """Return the start, or the identity for None, with the size, type and device of `like`."""
    return torch.eye(like.shape[-1], device=like.device, dtype=like.dtype) if start is None else start


def change_for_writes(m: LinearMemoryState, rule: UpdateRule) -> Tensor:
    """Return the change at the chunk's start from which writes are computed, detached for first-order gradients."""
    return m.boundary_change.detach() if rule.outer_gradient == "first_order" else m.boundary_change


def write_linear(
    start: Start,
    m: LinearMemoryState,
    key: Float[Tensor, "B H T I"],
    u: Float[Tensor, "B H T O"],
    q: Float[Tensor, "B H T I"] | None,
    gates: Gates,
    rule: UpdateRule,
) -> tuple[Float[Tensor, "B H T O"] | None, LinearMemoryState]:
    """Write values `u` along their keys into one matrix; return what the queries read, and the state after that."""
    decays_to_start = rule.decay_to == "start"
    output = chunk_gated_delta_rule(
        m.change if decays_to_start else materialize(start, m.change),
        key,
        u,
        None if rule.read == "boundary" else q,
        gates,
        N=m.momentum,
        anchor=apply_start(start, key) if decays_to_start and gates.erase is not None else None,
        read="before" if rule.read == "before" else "after",
    )
    change = output.S if decays_to_start else output.S - start_matrix(start, m.change)
    after = replace(m, change=change, momentum=output.N)
    if q is None:
        return None, after
    if rule.read == "boundary":
        return apply_start(start, q) + q @ m.boundary_change.mT, after
    y = cast(Tensor, output.Y)
    return (y + apply_start(start, q) if decays_to_start else y), after


def read_linear(
    start: Start, m: LinearMemoryState, q: Float[Tensor, "B H T I"], rule: UpdateRule
) -> Float[Tensor, "B H T O"]:
    return apply_start(start, q) + q @ (m.boundary_change if rule.read == "boundary" else m.change).mT


class MLPStart(NamedTuple):
    """Trained start of a memory of two layers."""

    W1: Float[Tensor, "H E F"]
    W2: Float[Tensor, "H F E"]


MemoryStart = Start | MLPStart


class MLPGates(NamedTuple):
    """Gates of the two layers of a memory."""

    W1: Gates
    W2: Gates


class MLPActivations(NamedTuple):
    """Forward pass of a two-layer memory at the chunk's start: a = W2 x, h = σ(a), y = x + W1 h."""

    a: Float[Tensor, "B H T F"]
    h: Float[Tensor, "B H T F"]
    y: Vectors
    W1: Float[Tensor, "B H E F"]


def mlp_forward(starts: MLPStart, m: MLPMemoryState, x: Vectors, rule: UpdateRule) -> MLPActivations:
    """Compute x + W1 σ(W2 x) with the weights at the chunk's start."""
    W1 = materialize(starts.W1, change_for_writes(m.W1, rule))
    W2 = materialize(starts.W2, change_for_writes(m.W2, rule))
    a = x @ W2.mT
    h = F.silu(a)
    return MLPActivations(a, h, x + h @ W1.mT, W1)


def silu_derivative(a: Tensor) -> Tensor:
    s = a.sigmoid()
    return s * (1 + a * (1 - s))


def write_mlp(
    starts: MLPStart,
    m: MLPMemoryState,
    k: Vectors,
    e: Vectors,
    activations: MLPActivations,
    q: Vectors | None,
    gates: MLPGates,
    rule: UpdateRule,
) -> tuple[Vectors | None, MLPMemoryState]:
    """Write tokens into a two-layer memory and read the queries.

    The gradients at the chunk's start are -d kᵀ for W2 and -e hᵀ for W1, each of rank one per token. W2 is erased along
    k, W1 along h.
    """
    d = (e @ activations.W1) * silu_derivative(activations.a)
    z, W2 = write_linear(starts.W2, m.W2, k, -d, q, gates.W2, rule)
    h = None if z is None else F.silu(z)
    y, W1 = write_linear(starts.W1, m.W1, activations.h, -e, h, gates.W1, rule)
    return (None if y is None or q is None else q + y), MLPMemoryState(W1, W2)


def read_mlp(starts: MLPStart, m: MLPMemoryState, q: Vectors, rule: UpdateRule) -> Vectors:
    """Read the queries from a two-layer memory without writing."""
    return q + read_linear(starts.W1, m.W1, F.silu(read_linear(starts.W2, m.W2, q, rule)), rule)


def clip_at_boundary(start: Start, m: LinearMemoryState, max_norm: float | None, rule: UpdateRule) -> LinearMemoryState:
    """End a chunk: clip the norm of the matrix, and compute the next chunk's writes from it."""
    if max_norm is None:
        return replace(m, boundary_change=m.change)
    state = m.change if rule.decay_to == "start" else materialize(start, m.change)
    return scale_state(start, m, norm_clip_factor(max_norm, state), rule)


def clip_memory_at_boundary(
    start: MemoryStart, m: MemoryState, max_norm: float | None, rule: UpdateRule
) -> MemoryState:
    if isinstance(m, MLPMemoryState):
        W1, W2 = cast(MLPStart, start)
        return MLPMemoryState(clip_at_boundary(W1, m.W1, max_norm, rule), clip_at_boundary(W2, m.W2, max_norm, rule))
    return clip_at_boundary(cast(Start, start), m, max_norm, rule)


def scale_state(
    start: Start, m: LinearMemoryState, factor: Float[Tensor, "B H 1 1"], rule: UpdateRule
) -> LinearMemoryState:
    """End a chunk: scale the matrix, or only its change where memories decay to their start."""
    change = m.change * factor
    if rule.decay_to == "zero":
        change = materialize(start, m.change) * factor - start_matrix(start, change)
    return replace(m, change=change, boundary_change=change)


def gate_and_project(y: Vectors, x: Float[Tensor, "B T D"], w: Mapping[str, Tensor]) -> Float[Tensor, "B T D"]:
    """Normalize each head's output, gate it by the input, and project it by W_o."""
    y = y * (y.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
    y = y.transpose(1, 2).flatten(2) * w["norm.weight"].to(y.dtype)
    gate = F.silu(F.linear(x, w["g_proj.weight"]))
    return F.linear(y.to(x.dtype) * gate, w["o_proj.weight"])
