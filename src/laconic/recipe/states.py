"""What a state holds, told without its model: how often each level has moved and how far, memories; and the bill."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.core import state as values
from laconic.core.families import DecoderConfig
from laconic.core.state import Deep, Matrix, State
from laconic.methods.changes import length
from laconic.recipe.bill import counted, size


class Rate(NamedTuple):
    """All levels of one chunk: in how many layers, updates of one layer (mean over rows), ‖Δθ‖_F over all of them."""

    chunk: int
    layers: int
    updates: float
    moved: float


class Memory(NamedTuple):
    """A group of linear memories by its name: in how many layers, tokens learned, and the norm of what has changed."""

    name: str
    layers: int
    tokens: float
    moved: float


def rates(state: State, chunks: Sequence[Sequence[int]]) -> list[Rate]:
    """The levels by their chunk, fastest first; `chunks` are those of every layer, as the model has them."""
    found: dict[int, list[tuple[float, Tensor]]] = {}
    for layer, sizes in zip(state.layers, chunks, strict=True):
        for level, chunk in zip(layer.cms.levels if layer.cms else (), sizes, strict=True):
            squares = [length(change).double().square() for change in level.moved.values()]
            total = torch.stack([x.cpu() for x in squares]).sum(0)
            found.setdefault(chunk, []).append((float(level.updates.double().mean()), total))
    return [
        Rate(chunk, len(each), sum(n for n, _ in each) / len(each), mean_root([x for _, x in each]))
        for chunk, each in sorted(found.items())
    ]


def memories(state: State) -> list[Memory]:
    """The memories in the place of attention, by name."""
    found: dict[str, list[tuple[float, Tensor]]] = {}
    for layer in state.layers:
        for name, memory in layer.memory.items():
            parts = {f"{name}.W1": memory.W1, f"{name}.W2": memory.W2} if isinstance(memory, Deep) else {name: memory}
            for part, matrix in parts.items():
                found.setdefault(part, []).append((float(matrix.count.double().mean()), squared(matrix)))
    return [
        Memory(name, len(each), sum(n for n, _ in each) / len(each), mean_root([x for _, x in each]))
        for name, each in found.items()
    ]


def squared(matrix: Matrix) -> Tensor:
    """‖·‖_F² of every row's change."""
    return matrix.now.detach().double().square().flatten(1).sum(1).cpu()


def mean_root(squares: Sequence[Tensor]) -> float:
    """The norm over all parts, the mean over rows."""
    return float(torch.stack(list(squares)).sum(0).sqrt().mean())


def rate_lines(state: State, chunks: Sequence[Sequence[int]]) -> list[str]:
    """Levels and memories as a person reads them; lengths that are 0 to the eye are 0."""
    found = [
        f"level      chunk {r.chunk:,} in {counted(r.layers, 'layer')}: {r.updates:,.0f} updates, "
        f"moved by {seen(r.moved)}"
        for r in rates(state, chunks)
    ]
    return found + [
        f"memory     {m.name} in {counted(m.layers, 'layer')}: {m.tokens:,.0f} tokens, moved by {seen(m.moved)}"
        for m in memories(state)
    ]


def seen(x: float) -> str:
    """A norm; the root of the least square that counts is none."""
    return f"{x:.4g}" if x > 1e-12 else "0"


@dataclass(frozen=True)
class StateBill:
    """Of all rows together: tokens read, and bytes of the state beside those of keys and values of as many tokens.

    `text_cache` is 2 L G E a token, of a decoder of the same layers and width.
    """

    texts: int
    tokens: int
    state: int
    text_cache: int
    levels: tuple[Rate, ...]
    memories: tuple[Memory, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        parts = {"levels": [x._asdict() for x in self.levels], "memories": [x._asdict() for x in self.memories]}
        return {**asdict(self), **parts}

    def lines(self) -> list[str]:
        """As a person reads it, but for levels and memories."""
        each = f" of {self.texts:,} texts" if self.texts > 1 else ""
        return [
            f"read       {self.tokens:,} tokens{each}",
            f"bytes      {size(self.state)} of state in place of {size(self.text_cache)} of keys and values",
        ]


def bill(state: State, chunks: Sequence[Sequence[int]], config: DecoderConfig, width: int, tokens: int) -> StateBill:
    """Of a state that has read so many tokens; `width` is bytes of a number in a cache."""
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
    return StateBill(
        len(state.position), tokens, values.bytes(state), tokens * position, tuple(rates(state, chunks)),
        tuple(memories(state)),
    )  # fmt: skip


def plain(state: State, about: Mapping[str, Any]) -> dict[str, Any]:
    """A state's file as JSON has it, without the form of its tensors."""
    source: Mapping[str, Any] = about.get("source") or {}
    chunks = source.get("chunks") or ()
    told = {name: about.get(name) for name in ("holds", "schema", "model", "tokens", "version")}
    levels = rates(state, chunks) if chunks else []
    return {
        **told,
        "kind": "state",
        "rows": len(state.position),
        "positions": state.position.tolist(),
        "state_bytes": values.bytes(state),
        "levels": [x._asdict() for x in levels],
        "memories": [x._asdict() for x in memories(state)],
        "tokenizer": source.get("tokenizer"),
        "created": source.get("created"),
        "documents": source.get("documents", []),
    }
