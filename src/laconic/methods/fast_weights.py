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

from laconic.core import state as values
from laconic.core.state import Deep, Matrix
from laconic.methods.delta import Gates, PerToken, delta, within
from laconic.methods.learning_settings import Gradient, Read

Memory = Mapping[str, Matrix | Deep]
Start = Float[Tensor, "H O I"] | None  # None is the identity
Vectors = Float[Tensor, "B H T E"]


class Rule(NamedTuple):
    """How a memory is kept and read: what it decays to, which state a query meets, and what flows through a write."""

    decay_to: Literal["zero", "start"] = "zero"
    read: Read = "after"
    gradient: Gradient = "full"


def fresh(B: int, shape: tuple[int, ...], momentum: bool, like: Tensor) -> Matrix:
    """No change yet, in the wide type of `like` and on its device."""
    zero = torch.zeros(B, *shape, device=like.device, dtype=like.dtype)
    return Matrix(zero, zero, zero if momentum else None, torch.zeros(B, dtype=torch.long))


def through(start: Start, x: Float[Tensor, "B H T I"]) -> Float[Tensor, "B H T O"]:
    """The start applied to every vector."""
    return x if start is None else x @ start.mT


def whole(start: Start, change: Tensor) -> Float[Tensor, "B H O I"]:
    """The memory: start and change."""
    return change + matrix(start, change)


def matrix(start: Start, like: Tensor) -> Float[Tensor, "*H O I"]:
    """The start as it stands in the memory."""
    return torch.eye(like.shape[-1], device=like.device, dtype=like.dtype) if start is None else start


def source(m: Matrix, rule: Rule) -> Tensor:
    """The change at the boundary as what is written sees it: a constant, or with its gradient."""
    return m.first.detach() if rule.gradient in ("first_order", "none") else m.first


def written(
    start: Start,
    m: Matrix,
    key: Float[Tensor, "B H T I"],
    u: Float[Tensor, "B H T O"],
    q: Float[Tensor, "B H T I"] | None,
    gates: Gates,
    rule: Rule,
    *,
    erase: PerToken | None = None,
    live: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B H T O"] | None, Matrix]:
    """What the queries read from one matrix while the tokens are written into it, and the matrix after them."""
    base = start
    if rule.gradient == "none":
        m, key, u, base = values.detach(m), key.detach(), u.detach(), None if start is None else start.detach()
        gates = Gates(*(None if x is None else x.detach() for x in gates))  # pyright: ignore[reportArgumentType]
        erase = None if erase is None else erase.detach()
    to_start = rule.decay_to == "start"
    asked = None if rule.read == "boundary" else q
    found = delta(
        m.now if to_start else whole(base, m.now),
        key,
        u,
        asked,
        gates,
        erase=erase,
        N=m.momentum,
        anchor=through(base, key) if to_start and erase is not None else None,
        live=live,
        read="before" if rule.read == "before" else "after",
    )
    now = found.S if to_start else found.S - matrix(base, m.now)
    if q is None:
        return None, replace(m, now=now, momentum=found.N)
    if rule.read == "boundary":
        y = through(start, q) + q @ m.first.mT
    elif found.Y is not None and to_start:
        y = found.Y + through(start, q)
    else:
        y = cast(Tensor, found.Y)
        if rule.gradient == "none" and start is not None:  # adds 0, and the gradient of the start's direct use
            direct = through(start, q.detach())
            y = y + (direct - direct.detach())
    return y, replace(m, now=now, momentum=found.N)


def recalled(start: Start, m: Matrix, q: Float[Tensor, "B H T I"], rule: Rule) -> Float[Tensor, "B H T O"]:
    """What the queries read where nothing is written."""
    return through(start, q) + q @ (m.first if rule.read == "boundary" else m.now).mT


class Starts(NamedTuple):
    """The trained starts of a memory of two layers."""

    W1: Float[Tensor, "H E F"]
    W2: Float[Tensor, "H F E"]


class Inside(NamedTuple):
    """What a two-layer memory makes of keys at the boundary: inner input, inner output, output, and its matrices."""

    a: Float[Tensor, "B H T F"]
    h: Float[Tensor, "B H T F"]
    y: Vectors
    W1: Float[Tensor, "B H E F"]


def inside(starts: Starts, m: Deep, x: Vectors, rule: Rule) -> Inside:
    """x + W1 σ(W2 x) from the state at the boundary."""
    W1, W2 = whole(starts.W1, source(m.W1, rule)), whole(starts.W2, source(m.W2, rule))
    a = x @ W2.mT
    h = torch.nn.functional.silu(a)
    return Inside(a, h, x + h @ W1.mT, W1)


def slope(a: Tensor) -> Tensor:
    """σ'."""
    s = a.sigmoid()
    return s * (1 + a * (1 - s))


def written_deep(
    starts: Starts,
    m: Deep,
    k: Vectors,
    e: Vectors,
    inner: Inside,
    q: Vectors | None,
    gates: Gates,
    rule: Rule,
    *,
    outer_gates: Gates | None = None,
    erase: PerToken | None = None,
    erase_inner: PerToken | None = None,
    live: Bool[Tensor, "B T"] | None = None,
) -> tuple[Vectors | None, Deep]:
    """The same for two layers: the gradients at the boundary are -d kᵀ and -e hᵀ, each of rank one.

    `erase` acts on W2 along k, `erase_inner` on W1 along h; `outer_gates` are W1's where they are its own.
    """
    d = (e @ inner.W1) * slope(inner.a)
    z, W2 = written(starts.W2, m.W2, k, -d, q, gates, rule, erase=erase, live=live)
    h = None if z is None else torch.nn.functional.silu(z)
    y, W1 = written(starts.W1, m.W1, inner.h, -e, h, outer_gates or gates, rule, erase=erase_inner, live=live)
    return (None if y is None or q is None else q + y), Deep(W1, W2)


def recalled_deep(starts: Starts, m: Deep, q: Vectors, rule: Rule) -> Vectors:
    """What the queries read from two layers where nothing is written."""
    return q + recalled(starts.W1, m.W1, torch.nn.functional.silu(recalled(starts.W2, m.W2, q, rule)), rule)


def bounded(start: Start, m: Matrix, radius: float | None, rule: Rule) -> Matrix:
    """A matrix at its boundary: within the guard, and the one that the next chunk is written from."""
    if radius is None:
        return replace(m, first=m.now)
    return shrunk(start, m, within(radius, m.now if rule.decay_to == "start" else whole(start, m.now)), rule)


def shrunk(start: Start, m: Matrix, share: Float[Tensor, "B H 1 1"], rule: Rule) -> Matrix:
    """That share of the state, of its change where it decays to its start, as the next chunk is written from it."""
    now = m.now * share
    if rule.decay_to == "zero":
        now = whole(start, m.now) * share - matrix(start, now)
    return replace(m, now=now, first=now)
