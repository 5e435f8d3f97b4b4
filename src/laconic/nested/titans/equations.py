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

from laconic.config.nested import ReadPosition
from laconic.models.attention import accumulation_dtype, split_heads
from laconic.nested.recurrence.gated_delta_rule import Gates, clip_state_norm
from laconic.nested.recurrence.memory_cells import (
    MemoryStates,
    MLPStart,
    Start,
    UpdateRule,
    Vectors,
    change_for_writes,
    clip_at_boundary,
    materialize,
    mlp_forward,
    read_linear,
    read_mlp,
    silu_derivative,
    write_linear,
    write_mlp,
)
from laconic.nested.recurrence.packing import causal_conv
from laconic.nested.state import LinearMemoryState, MLPMemoryState

PROJECTION_NAMES = ("q", "k", "v")


class QKVProjections(NamedTuple):
    """Eq. 11's vectors, one per head and token, and the tails of their convolutions."""

    q: Vectors
    k: Vectors
    v: Vectors
    conv_tails: dict[str, Tensor]


def l2_normalize(x: Float[Tensor, "*rows E"]) -> Float[Tensor, "*rows E"]:
    """Vectors of length 1; a zero stays zero, with a finite gradient."""
    return x * x.square().sum(-1, keepdim=True).clamp(min=1e-12).rsqrt()


def project_qkv(
    x: Float[Tensor, "B T D"],
    w: Mapping[str, Tensor],
    conv_tails: Mapping[str, Tensor],
    num_heads: int,
    lengths: tuple[int, ...] | None,
) -> QKVProjections:
    """Eq. 11: k = l2(SiLU(conv(x W_K))), v = SiLU(conv(x W_V)), and queries as keys."""
    found: list[Tensor] = []
    after: dict[str, Tensor] = {}
    for name in PROJECTION_NAMES:
        y = F.linear(x, w[f"{name}_proj.weight"]).to(accumulation_dtype(x.dtype))
        y, after[name] = causal_conv(y, conv_tails[name], w[f"{name}_conv.weight"], lengths)
        y = split_heads(F.silu(y), num_heads)
        found.append(y if name == "v" else l2_normalize(y))
    return QKVProjections(found[0], found[1], found[2], after)


def loss_gradient(y: Vectors, v: Vectors, factor: int = 1) -> Vectors:
    """Eq. 12: the gradient of factor/2 ‖y - v‖² at a memory's output y = M_c(k); the square is summed over E."""
    return factor * (y - v)


def recurrent_step(
    M: Float[Tensor, "B H O I"],
    S: Float[Tensor, "B H O I"] | None,
    gradient: Float[Tensor, "B H O I"],
    decay: Float[Tensor, "B H"],
    step_size: Float[Tensor, "B H"],
    momentum: Float[Tensor, "B H"] | None,
) -> tuple[Float[Tensor, "B H O I"], Float[Tensor, "B H O I"] | None]:
    """Eq. 13,14: S_t = momentum S_{t-1} - step gradient; M_t = keep M_{t-1} + S_t."""
    write, new = -step_size[..., None, None] * gradient, None
    if S is not None and momentum is not None:
        write = new = momentum[..., None, None] * S + write
    return decay[..., None, None] * M + write, new


def read_memory(
    start: Start | MLPStart, part: LinearMemoryState | MLPMemoryState, q: Vectors, rule: UpdateRule
) -> Vectors:
    """Eq. 15: y = M(q), where nothing is written."""
    if isinstance(start, MLPStart) and isinstance(part, MLPMemoryState):
        return read_mlp(start, part, q, rule)
    assert not isinstance(start, MLPStart)
    assert isinstance(part, LinearMemoryState)
    return read_linear(start, part, q, rule)


def chunk_update(
    start: Start | MLPStart,
    part: LinearMemoryState | MLPMemoryState,
    k: Vectors,
    v: Vectors,
    q: Vectors,
    gates: Gates,
    rule: UpdateRule,
    factor: int = 1,
    valid: Bool[Tensor, "B T"] | None = None,
) -> tuple[Vectors, LinearMemoryState | MLPMemoryState]:
    """Eq. 16-18: M_t(q_t) of a whole chunk, and M and S at its end, with every gradient taken at M_c."""
    if isinstance(start, MLPStart) and isinstance(part, MLPMemoryState):
        inner = mlp_forward(start, part, k, rule)
        y, moved = write_mlp(start, part, k, loss_gradient(inner.y, v, factor), inner, q, gates, rule, valid=valid)
    else:
        assert not isinstance(start, MLPStart)
        assert isinstance(part, LinearMemoryState)
        e = loss_gradient(k @ materialize(start, change_for_writes(part, rule)).mT, v, factor)
        y, moved = write_linear(start, part, k, -e, q, gates, rule, valid=valid)
    assert y is not None
    return y, moved


def recurrent_titans(
    start: Start | MLPStart,
    k: Vectors,
    v: Vectors,
    q: Vectors,
    gates: Gates,
    chunk_size: int,
    *,
    factor: int = 1,
    read: ReadPosition = "after",
    max_norm: float | None = None,
) -> Vectors:
    """The definition: from the start, token by token, every matrix of the memory held whole."""
    Ms = [x.expand(len(k), *x.shape) for x in (start if isinstance(start, MLPStart) else (start,)) if x is not None]
    Ss = [None if gates.momentum is None else torch.zeros_like(M) for M in Ms]
    found: list[Tensor] = []
    firsts = Ms
    for t in range(k.shape[2]):
        key, value, query = (x[:, :, t, :, None] for x in (k, v, q))
        if t % chunk_size == 0:
            Ms = firsts = Ms if max_norm is None or t == 0 else [clip_state_norm(M, max_norm) for M in Ms]
        before, at = Ms, (gates.decay[:, :, t], gates.step_size[:, :, t])
        momentum = None if gates.momentum is None else gates.momentum[:, :, t]
        gradients = loss_gradients(firsts, key, value, factor)
        pairs = [recurrent_step(M, S, g, *at, momentum) for M, S, g in zip(Ms, Ss, gradients, strict=True)]
        Ms, Ss = [M for M, _ in pairs], [S for _, S in pairs]
        found.append(memory_output({"after": Ms, "before": before, "boundary": firsts}[read], query)[..., 0])
    return torch.stack(found, 2)


def memory_output(Ms: list[Tensor], x: Tensor) -> Tensor:
    """M(x) of one column: M x, or x + W1 σ(W2 x)."""
    return Ms[0] @ x if len(Ms) == 1 else x + Ms[0] @ F.silu(Ms[1] @ x)


def loss_gradients(Ms: list[Tensor], k: Tensor, v: Tensor, factor: int) -> list[Tensor]:
    """The gradients of the loss at one pair, one outer product for each matrix."""
    e = loss_gradient(memory_output(Ms, k), v, factor)
    if len(Ms) == 1:
        return [e @ k.mT]
    a = Ms[1] @ k
    return [e @ F.silu(a).mT, ((Ms[0].mT @ e) * silu_derivative(a)) @ k.mT]


@dataclass(frozen=True)
class TitansMemory:
    """One memory of a layer as `read_along` takes it."""

    name: str
    chunk_size: int
    start: Start | MLPStart
    rule: UpdateRule
    factor: int
    max_norm: float | None

    @property
    def chunk_sizes(self) -> dict[str, int]:
        """Its chunk, by its name."""
        return {self.name: self.chunk_size}

    def step_chunk(
        self, states: MemoryStates, inputs: tuple[Tensor, ...], valid: Tensor | None
    ) -> tuple[Tensor, MemoryStates]:
        """Tokens between two boundaries."""
        q, k, v, *gates = inputs
        part = states[self.name]
        y, moved = chunk_update(self.start, part, k, v, q, Gates(*gates), self.rule, self.factor, valid)
        return y, {self.name: moved}

    def end_chunks(self, states: MemoryStates, names: list[str]) -> MemoryStates:
        """Guarded, and the one that the next chunk is written from."""
        part = states[self.name]
        if isinstance(self.start, MLPStart) and isinstance(part, MLPMemoryState):
            W1, W2 = self.start
            part = MLPMemoryState(
                clip_at_boundary(W1, part.W1, self.max_norm, self.rule),
                clip_at_boundary(W2, part.W2, self.max_norm, self.rule),
            )
        elif not isinstance(self.start, MLPStart) and isinstance(part, LinearMemoryState):
            part = clip_at_boundary(self.start, part, self.max_norm, self.rule)
        return {self.name: part}
