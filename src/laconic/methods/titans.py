"""Titans: a memory that is trained while it reads, by gradient descent with momentum and decay, chunk by chunk.

Titans arXiv:2501.00663; TNT arXiv:2511.07343 for memories that start again and a second one of larger chunks.

Symbols: k, v, q keys, values and queries of a head [E]; M memory, M_c the same at its chunk's first token, S momentum
of its writes; the paper's 1 - alpha is keep, theta step, eta momentum. Losses are sums over E.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laconic.core.attention import split_heads, wide
from laconic.core.state import Deep, Matrix
from laconic.methods.delta import Gates, guarded
from laconic.methods.fast_weights import (
    Memory,
    Rule,
    Start,
    Starts,
    Vectors,
    bounded,
    inside,
    recalled,
    recalled_deep,
    slope,
    source,
    whole,
    written,
    written_deep,
)
from laconic.methods.learning_settings import Read
from laconic.methods.packing import convolved

PROJECTIONS = ("q", "k", "v")


class Projected(NamedTuple):
    """Eq. 11's vectors, one per head and token, and the tails of their convolutions."""

    q: Vectors
    k: Vectors
    v: Vectors
    tails: dict[str, Tensor]


def l2(x: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
    """Vectors of length 1; a zero stays zero, with a finite gradient."""
    return x * x.square().sum(-1, keepdim=True).clamp(min=1e-12).rsqrt()


def projections(
    x: Float[Tensor, "B T D"],
    w: Mapping[str, Tensor],
    tails: Mapping[str, Tensor],
    heads: int,
    lengths: tuple[int, ...] | None,
) -> Projected:
    """Eq. 11: k = l2(SiLU(conv(x W_K))), v = SiLU(conv(x W_V)), and queries as keys."""
    found: list[Tensor] = []
    after: dict[str, Tensor] = {}
    for name in PROJECTIONS:
        y = F.linear(x, w[f"{name}_proj.weight"]).to(wide(x.dtype))
        y, after[name] = convolved(y, tails[name], w[f"{name}_conv.weight"], lengths)
        y = split_heads(F.silu(y), heads)
        found.append(y if name == "v" else l2(y))
    return Projected(found[0], found[1], found[2], after)


def error(y: Vectors, v: Vectors, factor: int = 1) -> Vectors:
    """Eq. 12: the gradient of factor/2 ‖y - v‖² at a memory's output y = M_c(k); the square is summed over E."""
    return factor * (y - v)


def token(
    M: Float[Tensor, "B H O I"],
    S: Float[Tensor, "B H O I"] | None,
    gradient: Float[Tensor, "B H O I"],
    keep: Float[Tensor, "B H"],
    step: Float[Tensor, "B H"],
    momentum: Float[Tensor, "B H"] | None,
) -> tuple[Float[Tensor, "B H O I"], Float[Tensor, "B H O I"] | None]:
    """Eq. 13,14: S_t = momentum S_{t-1} - step gradient; M_t = keep M_{t-1} + S_t."""
    write, new = -step[..., None, None] * gradient, None
    if S is not None and momentum is not None:
        write = new = momentum[..., None, None] * S + write
    return keep[..., None, None] * M + write, new


def recall(start: Start | Starts, part: Matrix | Deep, q: Vectors, rule: Rule) -> Vectors:
    """Eq. 15: y = M(q), where nothing is written."""
    if isinstance(start, Starts) and isinstance(part, Deep):
        return recalled_deep(start, part, q, rule)
    assert not isinstance(start, Starts)
    assert isinstance(part, Matrix)
    return recalled(start, part, q, rule)


def chunk_form(
    start: Start | Starts,
    part: Matrix | Deep,
    k: Vectors,
    v: Vectors,
    q: Vectors,
    gates: Gates,
    rule: Rule,
    factor: int = 1,
    live: Bool[Tensor, "B T"] | None = None,
) -> tuple[Vectors, Matrix | Deep]:
    """Eq. 16-18: M_t(q_t) of a whole chunk, and M and S at its end, with every gradient taken at M_c."""
    if isinstance(start, Starts) and isinstance(part, Deep):
        inner = inside(start, part, k, rule)
        y, moved = written_deep(start, part, k, error(inner.y, v, factor), inner, q, gates, rule, live=live)
    else:
        assert not isinstance(start, Starts)
        assert isinstance(part, Matrix)
        e = error(k @ whole(start, source(part, rule)).mT, v, factor)
        y, moved = written(start, part, k, -e, q, gates, rule, live=live)
    assert y is not None
    return y, moved


def naive(
    start: Start | Starts,
    k: Vectors,
    v: Vectors,
    q: Vectors,
    gates: Gates,
    chunk: int,
    *,
    factor: int = 1,
    read: Read = "after",
    guard: float | None = None,
) -> Vectors:
    """The definition: from the start, token by token, every matrix of the memory held whole."""
    Ms = [x.expand(len(k), *x.shape) for x in (start if isinstance(start, Starts) else (start,)) if x is not None]
    Ss = [None if gates.momentum is None else torch.zeros_like(M) for M in Ms]
    found: list[Tensor] = []
    firsts = Ms
    for t in range(k.shape[2]):
        key, value, query = (x[:, :, t, :, None] for x in (k, v, q))
        if t % chunk == 0:
            Ms = firsts = Ms if guard is None or t == 0 else [guarded(M, guard) for M in Ms]
        before, at = Ms, (gates.keep[:, :, t], gates.step[:, :, t])
        momentum = None if gates.momentum is None else gates.momentum[:, :, t]
        gradients = slopes(firsts, key, value, factor)
        pairs = [token(M, S, g, *at, momentum) for M, S, g in zip(Ms, Ss, gradients, strict=True)]
        Ms, Ss = [M for M, _ in pairs], [S for _, S in pairs]
        found.append(output({"after": Ms, "before": before, "boundary": firsts}[read], query)[..., 0])
    return torch.stack(found, 2)


def output(Ms: list[Tensor], x: Tensor) -> Tensor:
    """M(x) of one column: M x, or x + W1 σ(W2 x)."""
    return Ms[0] @ x if len(Ms) == 1 else x + Ms[0] @ F.silu(Ms[1] @ x)


def slopes(Ms: list[Tensor], k: Tensor, v: Tensor, factor: int) -> list[Tensor]:
    """The gradients of the loss at one pair, one outer product for each matrix."""
    e = error(output(Ms, k), v, factor)
    if len(Ms) == 1:
        return [e @ k.mT]
    a = Ms[1] @ k
    return [e @ F.silu(a).mT, ((Ms[0].mT @ e) * slope(a)) @ k.mT]


@dataclass(frozen=True)
class Titan:
    """One memory of a layer as `read_along` takes it."""

    name: str
    chunk: int
    start: Start | Starts
    rule: Rule
    factor: int
    guard: float | None

    @property
    def chunks(self) -> dict[str, int]:
        """Its chunk, by its name."""
        return {self.name: self.chunk}

    def piece(self, memory: Memory, inputs: tuple[Tensor, ...], live: Tensor | None) -> tuple[Tensor, Memory]:
        """Tokens between two boundaries."""
        q, k, v, *gates = inputs
        part = memory[self.name]
        y, moved = chunk_form(self.start, part, k, v, q, Gates(*gates), self.rule, self.factor, live)
        return y, {self.name: moved}

    def closed(self, memory: Memory, names: list[str]) -> Memory:
        """Guarded, and the one that the next chunk is written from."""
        part = memory[self.name]
        if isinstance(self.start, Starts) and isinstance(part, Deep):
            W1, W2 = self.start
            part = Deep(bounded(W1, part.W1, self.guard, self.rule), bounded(W2, part.W2, self.guard, self.rule))
        elif not isinstance(self.start, Starts) and isinstance(part, Matrix):
            part = bounded(self.start, part, self.guard, self.rule)
        return {self.name: part}
