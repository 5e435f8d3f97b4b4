"""Tokens in order through memories that are written while they are read, each from boundary to boundary of its chunk.

Rows of a batch may stand at different places: those that stand alike are read together, each as if it were alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.config.nested import OuterGradient
from laconic.errors import UsageError
from laconic.nested import state as values
from laconic.nested.recurrence.memory_cells import MemoryStates
from laconic.nested.recurrence.packing import build_valid_mask, group_rows_by_offset, split_at_boundaries
from laconic.nested.state import LayerState, LinearMemoryState, MLPMemoryState

MAX_SCAN_TOKENS = 1024  # tokens read at once: their vectors fit into a processor's cache


class ScanOptions(NamedTuple):
    """How a whole call goes: a period per memory after which it starts again, chunks between two detaches."""

    outer_gradient: OuterGradient
    truncate_after: int | None
    reset_periods: Mapping[str, int]
    activation_checkpointing: bool


def check_inputs(
    layer: str,
    width: int,
    state: LayerState,
    x: Tensor,
    attention_mask: Tensor | None,
    outer_gradient: OuterGradient,
    truncate_after: int | None,
) -> None:
    """Raises `Usage` (2) for vectors, a mask, a state or a way of gradients that a layer cannot take."""
    B = len(x)
    if x.shape[2] != width or not x.shape[1]:
        raise UsageError(f"{layer}: vectors are {list(x.shape)}; give one or more of width {width}, [B, T, D]")
    if values.num_rows(state) != B:
        raise UsageError(f"{layer}: {B} rows of vectors, the state has {values.num_rows(state)}; take or join its rows")
    if attention_mask is not None and attention_mask.shape != x.shape[:2]:
        raise UsageError(
            f"{layer}: live is {list(attention_mask.shape)}, the vectors are {list(x.shape)}; give one of [B, T]"
        )
    if (outer_gradient == "truncated") != (truncate_after is not None) or (
        truncate_after is not None and truncate_after < 1
    ):
        raise UsageError(
            f"{layer}: gradient {outer_gradient!r}, horizon {truncate_after}; truncated has one of 1 or more, others none"
        )


def scan_in_segments(
    scan_function: Callable[..., tuple[Tensor, LayerState]], state: LayerState, x: Tensor, attention_mask: Tensor | None
) -> tuple[Tensor, LayerState]:
    """A long text by stretches, each on the state that the one before left, so that what is at work stays small."""
    ys: list[Tensor] = []
    for a in range(0, x.shape[1], MAX_SCAN_TOKENS):
        y, state = scan_function(
            state,
            x[:, a : a + MAX_SCAN_TOKENS],
            live=None if attention_mask is None else attention_mask[:, a : a + MAX_SCAN_TOKENS],
        )
        ys.append(y)
    return torch.cat(ys, 1), state


@runtime_checkable
class ChunkedMemory(Protocol):
    """Memories that read together: `piece` reads tokens between two boundaries, `closed` ends chunks."""

    @property
    def chunk_sizes(self) -> Mapping[str, int]: ...

    def step_chunk(
        self, states: MemoryStates, inputs: tuple[Tensor, ...], valid: Tensor | None
    ) -> tuple[Tensor, MemoryStates]: ...

    def end_chunks(self, states: MemoryStates, names: list[str]) -> MemoryStates: ...


def scan_chunks(
    memory: ChunkedMemory,
    memory_states: MemoryStates,
    inputs: tuple[Tensor, ...],
    lengths: tuple[int, ...] | None,
    options: ScanOptions,
) -> tuple[Tensor, MemoryStates]:
    """Tokens [B, H, T, …] in order through memories whose rows may stand at different places in their chunks."""
    count = token_counts(memory_states)
    period = max([*memory.chunk_sizes.values(), *options.reset_periods.values()])
    groups = group_rows_by_offset(count, period)
    if len(groups) == 1:
        return _aligned(memory, memory_states, inputs, lengths, next(iter(groups)), options)
    ys: list[Tensor] = []
    states: list[MemoryStates] = []
    for offset, rows in groups.items():
        at = torch.tensor(rows, device=inputs[0].device)
        few = None if lengths is None else tuple(lengths[row] for row in rows)
        mine = tuple(x.index_select(0, at) for x in inputs)
        y, moved = _aligned(memory, values.select_rows(memory_states, rows), mine, few, offset, options)
        ys.append(y)
        states.append(moved)
    back = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
    return torch.cat(ys).index_select(0, back.to(ys[0].device)), values.select_rows(values.concat_rows(*states), back)


def token_counts(states: MemoryStates) -> Tensor:
    """Tokens learned per row, which all memories of a layer share."""
    part = next(iter(states.values()))
    return part.num_tokens if isinstance(part, LinearMemoryState) else part.W1.num_tokens


def _aligned(
    system: ChunkedMemory,
    memory: MemoryStates,
    inputs: tuple[Tensor, ...],
    lengths: tuple[int, ...] | None,
    offset: int,
    how: ScanOptions,
) -> tuple[Tensor, MemoryStates]:
    """Rows that stand at the same place: piece by piece, each ending at the next boundary of any memory."""
    T, count = inputs[0].shape[2], token_counts(memory)
    T_live = T if lengths is None else max(lengths)
    live = build_valid_mask(lengths, T, inputs[0].device)
    ys: list[Tensor] = []
    for a, b in split_at_boundaries(offset, T_live, min(system.chunk_sizes.values())):
        here = None if live is None or (lengths is not None and min(lengths) >= b) else live[:, a:b]
        y, memory = _piece(system, memory, tuple(x[:, :, a:b] for x in inputs), here, how)
        ys.append(y)
        ended = [name for name, chunk in system.chunk_sizes.items() if (offset + b) % chunk == 0]
        if ended:
            reached = None if lengths is None else torch.tensor([n >= b for n in lengths])
            closed = system.end_chunks(memory, ended)
            closed = {
                name: _renewed(part, count + b, name, system.chunk_sizes[name], how) for name, part in closed.items()
            }
            memory = {**memory, **{name: _where(reached, new, memory[name]) for name, new in closed.items()}}
    added = count + T if lengths is None else count + torch.tensor(lengths)
    memory = {name: with_num_tokens(part, added) for name, part in memory.items()}
    if T_live < T:
        ys.append(inputs[0].new_zeros(*inputs[0].shape[:2], T - T_live, ys[0].shape[-1] if ys else inputs[0].shape[-1]))
    return torch.cat(ys, 2), memory


def _piece(
    system: ChunkedMemory, memory: MemoryStates, inputs: tuple[Tensor, ...], live: Tensor | None, how: ScanOptions
) -> tuple[Tensor, MemoryStates]:
    if not (how.activation_checkpointing and torch.is_grad_enabled()):
        return system.step_chunk(memory, inputs, live)
    again = cast(Any, checkpoint)
    return cast(tuple[Tensor, MemoryStates], again(system.step_chunk, memory, inputs, live, use_reentrant=False))


def _renewed(
    part: LinearMemoryState | MLPMemoryState, count: Tensor, name: str, chunk: int, how: ScanOptions
) -> LinearMemoryState | MLPMemoryState:
    """A memory at its boundary, started anew or cut from the graph where its count says so."""
    if name in how.reset_periods:
        part = _where(count % how.reset_periods[name] != 0, part, values.map_tensors(part, torch.zeros_like))
    if how.outer_gradient == "truncated" and how.truncate_after is not None:
        part = _where(count // chunk % how.truncate_after == 0, values.detach(part), part)
    return part


def _where(
    rows: Tensor | None, new: LinearMemoryState | MLPMemoryState, old: LinearMemoryState | MLPMemoryState
) -> LinearMemoryState | MLPMemoryState:
    """`new` in those rows, all where None; `old` elsewhere."""
    if rows is None or bool(rows.all()):
        return new
    if isinstance(new, MLPMemoryState) and isinstance(old, MLPMemoryState):
        return MLPMemoryState(_pick(rows, new.W1, old.W1), _pick(rows, new.W2, old.W2))
    return _pick(rows, cast(LinearMemoryState, new), cast(LinearMemoryState, old))


def _pick(rows: Tensor, new: LinearMemoryState, old: LinearMemoryState) -> LinearMemoryState:
    at = rows.to(new.change.device)[:, None, None, None]
    momentum = None
    if new.momentum is not None and old.momentum is not None:
        momentum = torch.where(at, new.momentum, old.momentum)
    return LinearMemoryState(
        torch.where(at, new.change, old.change),
        torch.where(at, new.boundary_change, old.boundary_change),
        momentum,
        new.num_tokens,
    )


def with_num_tokens(part: LinearMemoryState | MLPMemoryState, num_tokens: Tensor) -> LinearMemoryState | MLPMemoryState:
    """The same memory with other counts."""
    if isinstance(part, LinearMemoryState):
        return replace(part, num_tokens=num_tokens)
    return MLPMemoryState(replace(part.W1, num_tokens=num_tokens), replace(part.W2, num_tokens=num_tokens))
