"""Tokens in order through memories that are written while they are read, each from boundary to boundary of its chunk.

Rows of a batch may stand at different places: those that stand alike are read together, each as if it were alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from laconic.core import state as values
from laconic.core.errors import Usage
from laconic.core.state import Deep, Layer, Matrix
from laconic.methods.fast_weights import Memory
from laconic.methods.learning_settings import Gradient
from laconic.methods.packing import alive, by_offset, pieces

STRETCH = 1024  # tokens read at once: their vectors fit into a processor's cache


class Reading(NamedTuple):
    """How a whole call goes: a period per memory after which it starts again, chunks between two detaches."""

    gradient: Gradient
    horizon: int | None
    resets: Mapping[str, int]
    checkpoint: bool


def accept(
    layer: str, width: int, state: Layer, x: Tensor, live: Tensor | None, gradient: Gradient, horizon: int | None
) -> None:
    """Raises `Usage` (2) for vectors, a mask, a state or a way of gradients that a layer cannot take."""
    B = len(x)
    if x.shape[2] != width or not x.shape[1]:
        raise Usage(f"{layer}: vectors are {list(x.shape)}; give one or more of width {width}, [B, T, D]")
    if values.rows_of(state) != B:
        raise Usage(f"{layer}: {B} rows of vectors, the state has {values.rows_of(state)}; take or join its rows")
    if live is not None and live.shape != x.shape[:2]:
        raise Usage(f"{layer}: live is {list(live.shape)}, the vectors are {list(x.shape)}; give one of [B, T]")
    if (gradient == "truncated") != (horizon is not None) or (horizon is not None and horizon < 1):
        raise Usage(f"{layer}: gradient {gradient!r}, horizon {horizon}; truncated has one of 1 or more, others none")


def stretched(
    read: Callable[..., tuple[Tensor, Layer]], state: Layer, x: Tensor, live: Tensor | None
) -> tuple[Tensor, Layer]:
    """A long text by stretches, each on the state that the one before left, so that what is at work stays small."""
    ys: list[Tensor] = []
    for a in range(0, x.shape[1], STRETCH):
        y, state = read(state, x[:, a : a + STRETCH], live=None if live is None else live[:, a : a + STRETCH])
        ys.append(y)
    return torch.cat(ys, 1), state


@runtime_checkable
class System(Protocol):
    """Memories that read together: `piece` reads tokens between two boundaries, `closed` ends chunks."""

    @property
    def chunks(self) -> Mapping[str, int]: ...

    def piece(self, memory: Memory, inputs: tuple[Tensor, ...], live: Tensor | None) -> tuple[Tensor, Memory]: ...

    def closed(self, memory: Memory, names: list[str]) -> Memory: ...


def read_along(
    system: System, memory: Memory, inputs: tuple[Tensor, ...], lengths: tuple[int, ...] | None, how: Reading
) -> tuple[Tensor, Memory]:
    """Tokens [B, H, T, …] in order through memories whose rows may stand at different places in their chunks."""
    count = counts(memory)
    period = max([*system.chunks.values(), *how.resets.values()])
    groups = by_offset(count, period)
    if len(groups) == 1:
        return _aligned(system, memory, inputs, lengths, next(iter(groups)), how)
    ys: list[Tensor] = []
    states: list[Memory] = []
    for offset, rows in groups.items():
        at = torch.tensor(rows, device=inputs[0].device)
        few = None if lengths is None else tuple(lengths[row] for row in rows)
        mine = tuple(x.index_select(0, at) for x in inputs)
        y, moved = _aligned(system, values.take(memory, rows), mine, few, offset, how)
        ys.append(y)
        states.append(moved)
    back = torch.tensor([row for rows in groups.values() for row in rows]).argsort()
    return torch.cat(ys).index_select(0, back.to(ys[0].device)), values.take(values.join(*states), back)


def counts(memory: Memory) -> Tensor:
    """Tokens learned per row, which all memories of a layer share."""
    part = next(iter(memory.values()))
    return part.count if isinstance(part, Matrix) else part.W1.count


def _aligned(
    system: System,
    memory: Memory,
    inputs: tuple[Tensor, ...],
    lengths: tuple[int, ...] | None,
    offset: int,
    how: Reading,
) -> tuple[Tensor, Memory]:
    """Rows that stand at the same place: piece by piece, each ending at the next boundary of any memory."""
    T, count = inputs[0].shape[2], counts(memory)
    T_live = T if lengths is None else max(lengths)
    live = alive(lengths, T, inputs[0].device)
    ys: list[Tensor] = []
    for a, b in pieces(offset, T_live, min(system.chunks.values())):
        here = None if live is None or (lengths is not None and min(lengths) >= b) else live[:, a:b]
        y, memory = _piece(system, memory, tuple(x[:, :, a:b] for x in inputs), here, how)
        ys.append(y)
        ended = [name for name, chunk in system.chunks.items() if (offset + b) % chunk == 0]
        if ended:
            reached = None if lengths is None else torch.tensor([n >= b for n in lengths])
            closed = system.closed(memory, ended)
            closed = {name: _renewed(part, count + b, name, system.chunks[name], how) for name, part in closed.items()}
            memory = {**memory, **{name: _where(reached, new, memory[name]) for name, new in closed.items()}}
    added = count + T if lengths is None else count + torch.tensor(lengths)
    memory = {name: counted(part, added) for name, part in memory.items()}
    if T_live < T:
        ys.append(inputs[0].new_zeros(*inputs[0].shape[:2], T - T_live, ys[0].shape[-1] if ys else inputs[0].shape[-1]))
    return torch.cat(ys, 2), memory


def _piece(
    system: System, memory: Memory, inputs: tuple[Tensor, ...], live: Tensor | None, how: Reading
) -> tuple[Tensor, Memory]:
    if not (how.checkpoint and torch.is_grad_enabled()):
        return system.piece(memory, inputs, live)
    again = cast(Any, checkpoint)
    return cast(tuple[Tensor, Memory], again(system.piece, memory, inputs, live, use_reentrant=False))


def _renewed(part: Matrix | Deep, count: Tensor, name: str, chunk: int, how: Reading) -> Matrix | Deep:
    """A memory at its boundary, started anew or cut from the graph where its count says so."""
    if name in how.resets:
        part = _where(count % how.resets[name] != 0, part, values.mapped(part, torch.zeros_like))
    if how.gradient == "truncated" and how.horizon is not None:
        part = _where(count // chunk % how.horizon == 0, values.detach(part), part)
    return part


def _where(rows: Tensor | None, new: Matrix | Deep, old: Matrix | Deep) -> Matrix | Deep:
    """`new` in those rows, all where None; `old` elsewhere."""
    if rows is None or bool(rows.all()):
        return new
    if isinstance(new, Deep) and isinstance(old, Deep):
        return Deep(_pick(rows, new.W1, old.W1), _pick(rows, new.W2, old.W2))
    return _pick(rows, cast(Matrix, new), cast(Matrix, old))


def _pick(rows: Tensor, new: Matrix, old: Matrix) -> Matrix:
    at = rows.to(new.now.device)[:, None, None, None]
    momentum = None
    if new.momentum is not None and old.momentum is not None:
        momentum = torch.where(at, new.momentum, old.momentum)
    return Matrix(torch.where(at, new.now, old.now), torch.where(at, new.first, old.first), momentum, new.count)


def counted(part: Matrix | Deep, count: Tensor) -> Matrix | Deep:
    """The same memory with other counts."""
    if isinstance(part, Matrix):
        return replace(part, count=count)
    return Deep(replace(part.W1, count=count), replace(part.W2, count=count))
