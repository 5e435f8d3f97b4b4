"""Report what a fast-weight state holds: updates and norms of CMS levels and memories, and bytes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.console import pluralize
from laconic.experiment.from_recipe.cost import format_bytes, kv_bytes_per_position
from laconic.models.config import DecoderConfig
from laconic.nested.cms.level import frobenius_norm
from laconic.nested.state import FastWeightState, MLPMemoryState, num_bytes


def group_layers(parts: Iterable[tuple[Any, Tensor, Tensor]], key_name: str, count_name: str) -> list[dict[str, Any]]:
    """Return for each key the number of its layers, the mean count, and the norm over all layers, a mean over rows.

    `parts` are for each layer a key, and for each row a count and ‖·‖_F².
    """
    groups = dict[Any, list[tuple[float, Tensor]]]()
    for key, counts, squares in parts:
        groups.setdefault(key, []).append((float(counts.double().mean()), squares.cpu()))
    return [
        {
            key_name: key,
            "num_layers": len(rows),
            count_name: sum(n for n, _ in rows) / len(rows),
            "update_norm": float(torch.stack([x for _, x in rows]).sum(0).sqrt().mean()),
        }
        for key, rows in groups.items()
    ]


def level_reports(state: FastWeightState, chunks: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return the CMS levels by chunk size, fastest first; `chunks` has the chunk sizes of every layer."""
    parts = (
        (chunk, level.num_updates, torch.stack([frobenius_norm(x).double() ** 2 for x in level.change.values()]).sum(0))
        for layer, sizes in zip(state.layers, chunks, strict=True)
        for level, chunk in zip(layer.cms.levels if layer.cms else (), sizes, strict=True)
    )
    return sorted(group_layers(parts, "chunk_size", "updates_per_layer"), key=lambda report: report["chunk_size"])


def memory_reports(state: FastWeightState) -> list[dict[str, Any]]:
    """Return the memories by name: layers, tokens written, and norm of the change."""
    parts = list[tuple[str, Tensor, Tensor]]()
    for layer in state.layers:
        for name, memory in layer.memory.items():
            is_mlp = isinstance(memory, MLPMemoryState)
            matrices = {f"{name}.W1": memory.W1, f"{name}.W2": memory.W2} if is_mlp else {name: memory}
            for part, x in matrices.items():
                parts.append((part, x.num_tokens, x.change.detach().double().square().flatten(1).sum(1)))
    return group_layers(parts, "name", "num_tokens")


def format_reports(state: FastWeightState, chunks: Sequence[Sequence[int]]) -> list[str]:
    """Return levels and memories as lines of text; several rows are averaged."""
    means = f" (means over {len(state.position):,} rows)" if len(state.position) > 1 else ""
    lines = [
        f"level      chunk {r['chunk_size']:,} in {pluralize(r['num_layers'], 'layer')}: "
        f"{pluralize(round(r['updates_per_layer']), 'update')}, "
        f"norm of the change {format_norm(r['update_norm'])}{means}"
        for r in level_reports(state, chunks)
    ]
    return lines + [
        f"memory     {m['name']} in {pluralize(m['num_layers'], 'layer')}: {m['num_tokens']:,.0f} tokens, "
        f"norm of the change {format_norm(m['update_norm'])}{means}"
        for m in memory_reports(state)
    ]


def format_norm(x: float) -> str:
    """Return a norm as text; values below 1e-12 are rounding and print as 0."""
    return f"{x:.4g}" if x > 1e-12 else "0"


def describe_state_cost(
    state: FastWeightState, chunks: Sequence[Sequence[int]], config: DecoderConfig, dtype: torch.dtype, num_tokens: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the cost of a state that has read `num_tokens` now as JSON and lines; `dtype` is that of a KV cache."""
    num_texts = len(state.position)
    num_state_tokens = int(state.position.sum())  # read now and before
    state_bytes = num_bytes(state)
    cache_bytes = num_state_tokens * kv_bytes_per_position(config, dtype)
    data = {
        "num_texts": num_texts,
        "num_tokens": num_tokens,
        "num_state_tokens": num_state_tokens,
        "state_bytes": state_bytes,
        "text_cache_bytes": cache_bytes,
        "levels": level_reports(state, chunks),
        "memories": memory_reports(state),
    }
    return data, [
        f"read       {num_tokens:,} tokens" + (f" of {num_texts:,} texts" if num_texts > 1 else ""),
        f"bytes      {format_bytes(state_bytes)} of state; a KV cache of all that it has read "
        f"({num_state_tokens:,} tokens) takes {format_bytes(cache_bytes)}",
    ]


def state_file_to_json(state: FastWeightState, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a state's file with reports on levels and memories, as JSON."""
    source: Mapping[str, Any] = about.get("source") or {}
    chunks = source.get("chunks") or ()
    fields = {name: about.get(name) for name in ("model", "tokens", "version")}
    return {
        **fields,
        "kind": "state",
        "rows": len(state.position),
        "positions": state.position.tolist(),
        "state_bytes": num_bytes(state),
        "levels": level_reports(state, chunks) if chunks else [],
        "memories": memory_reports(state),
        "tokenizer": source.get("tokenizer"),
        "created": source.get("created"),
        "documents": source.get("documents", []),
    }
