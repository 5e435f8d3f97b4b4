"""What a state holds, told without its model: how often each level has moved and how far, memories; and the bill."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.experiment.cost import format_bytes, format_count
from laconic.models.config import DecoderConfig
from laconic.nested import state as values
from laconic.nested.cms.low_rank_updates import frobenius_norm
from laconic.nested.state import FastWeightState, LinearMemoryState, MLPMemoryState


class LevelReport(NamedTuple):
    """All levels of one chunk: in how many layers, updates of one layer (mean over rows), ‖Δθ‖_F over all of them."""

    chunk_size: int
    num_layers: int
    updates_per_layer: float
    update_norm: float


class MemoryReport(NamedTuple):
    """A group of linear memories by its name: in how many layers, tokens learned, and the norm of what has changed."""

    name: str
    num_layers: int
    num_tokens: float
    update_norm: float


def level_reports(state: FastWeightState, chunks: Sequence[Sequence[int]]) -> list[LevelReport]:
    """The levels by their chunk, fastest first; `chunks` are those of every layer, as the model has them."""
    found: dict[int, list[tuple[float, Tensor]]] = {}
    for layer, sizes in zip(state.layers, chunks, strict=True):
        for level, chunk in zip(layer.cms.levels if layer.cms else (), sizes, strict=True):
            squares = [frobenius_norm(change).double().square() for change in level.change.values()]
            total = torch.stack([x.cpu() for x in squares]).sum(0)
            found.setdefault(chunk, []).append((float(level.num_updates.double().mean()), total))
    return [
        LevelReport(chunk, len(each), sum(n for n, _ in each) / len(each), mean_norm([x for _, x in each]))
        for chunk, each in sorted(found.items())
    ]


def memory_reports(state: FastWeightState) -> list[MemoryReport]:
    """The memories in the place of attention, by name."""
    found: dict[str, list[tuple[float, Tensor]]] = {}
    for layer in state.layers:
        for name, memory in layer.memory.items():
            parts = (
                {f"{name}.W1": memory.W1, f"{name}.W2": memory.W2}
                if isinstance(memory, MLPMemoryState)
                else {name: memory}
            )
            for part, matrix in parts.items():
                found.setdefault(part, []).append(
                    (float(matrix.num_tokens.double().mean()), squared_change_norm(matrix))
                )
    return [
        MemoryReport(name, len(each), sum(n for n, _ in each) / len(each), mean_norm([x for _, x in each]))
        for name, each in found.items()
    ]


def squared_change_norm(matrix: LinearMemoryState) -> Tensor:
    """‖·‖_F² of every row's change."""
    return matrix.change.detach().double().square().flatten(1).sum(1).cpu()


def mean_norm(squares: Sequence[Tensor]) -> float:
    """The norm over all parts, the mean over rows."""
    return float(torch.stack(list(squares)).sum(0).sqrt().mean())


def format_reports(state: FastWeightState, chunks: Sequence[Sequence[int]]) -> list[str]:
    """Levels and memories as a person reads them; lengths that are 0 to the eye are 0."""
    found = [
        f"level      chunk {r.chunk_size:,} in {format_count(r.num_layers, 'layer')}: {r.updates_per_layer:,.0f} updates, "
        f"moved by {format_norm(r.update_norm)}"
        for r in level_reports(state, chunks)
    ]
    return found + [
        f"memory     {m.name} in {format_count(m.num_layers, 'layer')}: {m.num_tokens:,.0f} tokens, moved by {format_norm(m.update_norm)}"
        for m in memory_reports(state)
    ]


def format_norm(x: float) -> str:
    """A norm; the root of the least square that counts is none."""
    return f"{x:.4g}" if x > 1e-12 else "0"


@dataclass(frozen=True)
class StateCost:
    """Of all rows together: tokens read, and bytes of the state beside those of keys and values of as many tokens.

    `text_cache` is 2 L G E a token, of a decoder of the same layers and width.
    """

    num_texts: int
    num_tokens: int
    state_bytes: int
    text_cache_bytes: int
    levels: tuple[LevelReport, ...]
    memories: tuple[MemoryReport, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        parts = {"levels": [x._asdict() for x in self.levels], "memories": [x._asdict() for x in self.memories]}
        return {**asdict(self), **parts}

    def to_lines(self) -> list[str]:
        """As a person reads it, but for levels and memories."""
        each = f" of {self.num_texts:,} texts" if self.num_texts > 1 else ""
        return [
            f"read       {self.num_tokens:,} tokens{each}",
            f"bytes      {format_bytes(self.state_bytes)} of state in place of {format_bytes(self.text_cache_bytes)} of keys and values",
        ]


def compute_state_cost(
    state: FastWeightState, chunks: Sequence[Sequence[int]], config: DecoderConfig, width: int, tokens: int
) -> StateCost:
    """Of a state that has read so many tokens; `width` is bytes of a number in a cache."""
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
    return StateCost(
        len(state.position), tokens, values.num_bytes(state), tokens * position, tuple(level_reports(state, chunks)),
        tuple(memory_reports(state)),
    )  # fmt: skip


def state_file_to_json(state: FastWeightState, about: Mapping[str, Any]) -> dict[str, Any]:
    """A state's file as JSON has it, without the form of its tensors."""
    source: Mapping[str, Any] = about.get("source") or {}
    chunks = source.get("chunks") or ()
    told = {name: about.get(name) for name in ("holds", "schema", "model", "tokens", "version")}
    levels = level_reports(state, chunks) if chunks else []
    return {
        **told,
        "kind": "state",
        "rows": len(state.position),
        "positions": state.position.tolist(),
        "state_bytes": values.num_bytes(state),
        "cms": [x._asdict() for x in levels],
        "memories": [x._asdict() for x in memory_reports(state)],
        "tokenizer": source.get("tokenizer"),
        "created": source.get("created"),
        "documents": source.get("documents", []),
    }
