"""Report what a fast-weight state holds: updates and norms of CMS levels and memories, and bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.console import pluralize
from laconic.experiment.from_recipe.cost import format_bytes, kv_bytes_per_position
from laconic.models.config import DecoderConfig
from laconic.nested import state as values
from laconic.nested.cms.level import frobenius_norm
from laconic.nested.state import FastWeightState, LinearMemoryState, MLPMemoryState


class LevelReport(NamedTuple):
    """All levels of one chunk size: layers, updates of one layer (mean over rows), and ‖Δθ‖_F over all layers."""

    chunk_size: int
    num_layers: int
    updates_per_layer: float
    update_norm: float


class MemoryReport(NamedTuple):
    """All memories of one name: layers, tokens written, and norm of the change."""

    name: str
    num_layers: int
    num_tokens: float
    update_norm: float


def level_reports(state: FastWeightState, chunks: Sequence[Sequence[int]]) -> list[LevelReport]:
    """Return the CMS levels by chunk size, fastest first; `chunks` has the chunk sizes of every layer."""
    by_chunk: dict[int, list[tuple[float, Tensor]]] = {}
    for layer, sizes in zip(state.layers, chunks, strict=True):
        for level, chunk in zip(layer.cms.levels if layer.cms else (), sizes, strict=True):
            squares = [frobenius_norm(change).double().square() for change in level.change.values()]
            total = torch.stack([x.cpu() for x in squares]).sum(0)
            by_chunk.setdefault(chunk, []).append((float(level.num_updates.double().mean()), total))
    return [
        LevelReport(chunk, len(rows), sum(n for n, _ in rows) / len(rows), mean_norm([x for _, x in rows]))
        for chunk, rows in sorted(by_chunk.items())
    ]


def memory_reports(state: FastWeightState) -> list[MemoryReport]:
    """Return the memories of the mixers by name."""
    by_name: dict[str, list[tuple[float, Tensor]]] = {}
    for layer in state.layers:
        for name, memory in layer.memory.items():
            parts = (
                {f"{name}.W1": memory.W1, f"{name}.W2": memory.W2}
                if isinstance(memory, MLPMemoryState)
                else {name: memory}
            )
            for part, matrix in parts.items():
                by_name.setdefault(part, []).append(
                    (float(matrix.num_tokens.double().mean()), squared_change_norm(matrix))
                )
    return [
        MemoryReport(name, len(rows), sum(n for n, _ in rows) / len(rows), mean_norm([x for _, x in rows]))
        for name, rows in by_name.items()
    ]


def squared_change_norm(matrix: LinearMemoryState) -> Tensor:
    """Return ‖·‖_F² of each row's change."""
    return matrix.change.detach().double().square().flatten(1).sum(1).cpu()


def mean_norm(squares: Sequence[Tensor]) -> float:
    """Return the norm over all parts, averaged over rows."""
    return float(torch.stack(list(squares)).sum(0).sqrt().mean())


def format_reports(state: FastWeightState, chunks: Sequence[Sequence[int]]) -> list[str]:
    """Return levels and memories as lines of text; several rows are averaged."""
    means = f" (means over {len(state.position):,} rows)" if len(state.position) > 1 else ""
    lines = [
        f"level      chunk {r.chunk_size:,} in {pluralize(r.num_layers, 'layer')}: {r.updates_per_layer:,.0f} "
        f"updates, norm of the change {format_norm(r.update_norm)}{means}"
        for r in level_reports(state, chunks)
    ]
    return lines + [
        f"memory     {m.name} in {pluralize(m.num_layers, 'layer')}: {m.num_tokens:,.0f} tokens, "
        f"norm of the change {format_norm(m.update_norm)}{means}"
        for m in memory_reports(state)
    ]


def format_norm(x: float) -> str:
    """Return a norm as text; values below 1e-12 are rounding and print as 0."""
    return f"{x:.4g}" if x > 1e-12 else "0"


@dataclass(frozen=True)
class StateCost:
    """Size of a state that may have read texts before.

    Attributes:
        num_texts: Rows of the state.
        num_tokens: Tokens read now.
        num_state_tokens: Tokens that its rows have read, now and before.
        state_bytes: Bytes of the state.
        text_cache_bytes: Bytes of a KV cache of `num_state_tokens`, 2 L G E numbers per token.
        levels: One for each level of MLPs.
        memories: One for each kind of memory.
    """

    num_texts: int
    num_tokens: int
    num_state_tokens: int
    state_bytes: int
    text_cache_bytes: int
    levels: tuple[LevelReport, ...]
    memories: tuple[MemoryReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all fields as a dict."""
        parts = {"levels": [x._asdict() for x in self.levels], "memories": [x._asdict() for x in self.memories]}
        return {**asdict(self), **parts}

    def to_lines(self) -> list[str]:
        """Return tokens and bytes as lines of text."""
        of_texts = f" of {self.num_texts:,} texts" if self.num_texts > 1 else ""
        return [
            f"read       {self.num_tokens:,} tokens{of_texts}",
            f"bytes      {format_bytes(self.state_bytes)} of state; a KV cache of all that it has read "
            f"({self.num_state_tokens:,} tokens) takes {format_bytes(self.text_cache_bytes)}",
        ]


def compute_state_cost(
    state: FastWeightState,
    chunks: Sequence[Sequence[int]],
    config: DecoderConfig,
    dtype: torch.dtype,
    num_tokens: int,
) -> StateCost:
    """Return the cost of a state that has read `num_tokens`; `dtype` is that of a KV cache."""
    num_state_tokens = int(state.position.sum())
    return StateCost(
        len(state.position),
        num_tokens,
        num_state_tokens,
        values.num_bytes(state),
        num_state_tokens * kv_bytes_per_position(config, dtype),
        tuple(level_reports(state, chunks)),
        tuple(memory_reports(state)),
    )


def state_file_to_json(state: FastWeightState, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a state's file with reports on levels and memories, as JSON."""
    source: Mapping[str, Any] = about.get("source") or {}
    chunks = source.get("chunks") or ()
    fields = {name: about.get(name) for name in ("model", "tokens", "version")}
    levels = level_reports(state, chunks) if chunks else []
    return {
        **fields,
        "kind": "state",
        "rows": len(state.position),
        "positions": state.position.tolist(),
        "state_bytes": values.num_bytes(state),
        "levels": [x._asdict() for x in levels],
        "memories": [x._asdict() for x in memory_reports(state)],
        "tokenizer": source.get("tokenizer"),
        "created": source.get("created"),
        "documents": source.get("documents", []),
    }
