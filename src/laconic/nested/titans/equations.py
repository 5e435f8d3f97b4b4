"""Titans: a memory trained while it reads, by gradient descent with momentum and decay, chunk by chunk.

Titans arXiv:2501.00663.

Symbols: k, v, q keys, values and queries of a head [E]; M memory, M_c the same at its chunk's first token, S momentum
of its writes. The paper's 1 - alpha is `decay`, theta `step_size`, eta `momentum`. Losses are sums over E.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex, cast

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laconic.config.nested import TitansOptions
from laconic.errors import UsageError
from laconic.generation.config import check_type
from laconic.models.attention import accumulation_dtype, split_heads
from laconic.nested.recurrence.chunked_scan import causal_conv
from laconic.nested.recurrence.gated_delta_rule import Gates
from laconic.nested.recurrence.memory_cells import (
    MemoryStart,
    MemoryStates,
    MLPGates,
    MLPStart,
    Start,
    UpdateRule,
    Vectors,
    change_for_writes,
    clip_memory_at_boundary,
    l2_normalize,
    materialize,
    mlp_forward,
    read_linear,
    read_mlp,
    write_linear,
    write_mlp,
)
from laconic.nested.state import MemoryState, MLPMemoryState

PROJECTION_NAMES = ("q", "k", "v")
MEMORY = "memory"  # name of the memory in states and weights


@dataclass(frozen=True)
class TitansShape:
    """Width, heads, chunk size and options of a layer. Raises `UsageError` if they do not fit together."""

    width: int
    num_heads: int
    chunk_size: int
    options: TitansOptions

    def __post_init__(self) -> None:
        for name in ("width", "num_heads", "chunk_size"):
            check_type(name, getattr(self, name), SupportsIndex, "an integer")
        if self.chunk_size < 1:
            raise UsageError(f"titans: chunk_size {self.chunk_size}: must be at least 1 token")
        if self.num_heads < 1 or self.width % self.num_heads:
            raise UsageError(f"titans: width {self.width} is not divisible by {self.num_heads} heads")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def label(self) -> str:
        return f"titans of width {self.width} and {self.num_heads} heads in chunks of {self.chunk_size}; "


class TitansParams(NamedTuple):
    """Shape and trained weights of a layer, by name."""

    shape: TitansShape
    weights: Mapping[str, Tensor]


class QKVProjections(NamedTuple):
    """Queries, keys and values of Eq. 11 per head and token, and the tails of their convolutions."""

    q: Vectors
    k: Vectors
    v: Vectors
    conv_tails: dict[str, Tensor]


def project_qkv(
    x: Float[Tensor, "B T D"],
    w: Mapping[str, Tensor],
    conv_tails: Mapping[str, Tensor],
    num_heads: int,
    lengths: tuple[int, ...] | None,
) -> QKVProjections:
    """Eq. 11: k = l2(SiLU(conv(x W_K))), v = SiLU(conv(x W_V)), and queries as keys."""
    projections: list[Tensor] = []
    new_tails: dict[str, Tensor] = {}
    for name in PROJECTION_NAMES:
        y = F.linear(x, w[f"{name}_proj.weight"]).to(accumulation_dtype(x.dtype))
        y, new_tails[name] = causal_conv(y, conv_tails[name], w[f"{name}_conv.weight"], lengths)
        y = split_heads(F.silu(y), num_heads)
        projections.append(y if name == "v" else l2_normalize(y))
    return QKVProjections(projections[0], projections[1], projections[2], new_tails)


def loss_gradient(y: Vectors, v: Vectors, factor: int = 1) -> Vectors:
    """Eq. 12: the gradient of factor/2 ‖y - v‖² by the output y = M_c(k) of the memory, summed over E."""
    return factor * (y - v)


def read_memory(start: MemoryStart, state: MemoryState, q: Vectors, rule: UpdateRule) -> Vectors:
    """Eq. 15: y = M(q), without writing."""
    if isinstance(state, MLPMemoryState):
        return read_mlp(cast(MLPStart, start), state, q, rule)
    return read_linear(cast(Start, start), state, q, rule)


def chunk_update(
    start: MemoryStart,
    state: MemoryState,
    k: Vectors,
    v: Vectors,
    q: Vectors,
    gates: Gates,
    rule: UpdateRule,
    factor: int = 1,
) -> tuple[Vectors, MemoryState]:
    """Eq. 16-18: M_t(q_t) of a chunk, and M and S at its end, with every gradient taken at M_c.

    `factor` is 1 for half the squared error as the inner loss, 2 for all of it.
    """
    if isinstance(state, MLPMemoryState):
        layers = cast(MLPStart, start)
        inner = mlp_forward(layers, state, k, rule)
        error = loss_gradient(inner.y, v, factor)
        y, new_state = write_mlp(layers, state, k, error, inner, q, MLPGates(gates, gates), rule)
    else:
        matrix = cast(Start, start)
        error = loss_gradient(k @ materialize(matrix, change_for_writes(state, rule)).mT, v, factor)
        y, new_state = write_linear(matrix, state, k, -error, q, gates, rule)
    assert y is not None
    return y, new_state


@dataclass(frozen=True)
class TitansMemory:
    """The memory of a layer, as a `ChunkedMemory`. `max_norm` bounds its norm at chunk boundaries; None: unbounded."""

    chunk_size: int
    start: MemoryStart
    rule: UpdateRule
    factor: int
    max_norm: float | None

    @property
    def chunk_sizes(self) -> dict[str, int]:
        return {MEMORY: self.chunk_size}

    def step_chunk(
        self, states: MemoryStates, inputs: tuple[Tensor, ...], valid: Tensor | None
    ) -> tuple[Tensor, MemoryStates]:
        """Write and read tokens (q, k, v and the gates) that no chunk boundary separates."""
        q, k, v, *gates = inputs
        all_gates = Gates(*gates)._replace(valid=valid)
        y, state = chunk_update(self.start, states[MEMORY], k, v, q, all_gates, self.rule, self.factor)
        return y, {MEMORY: state}

    def end_chunks(self, states: MemoryStates, names: list[str]) -> MemoryStates:
        """End the memory's chunk: clip its norm, and compute the next writes from it."""
        return {MEMORY: clip_memory_at_boundary(self.start, states[MEMORY], self.max_norm, self.rule)}
