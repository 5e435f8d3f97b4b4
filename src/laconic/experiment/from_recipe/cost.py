"""Report what a compression costs and saves, in tokens, positions and bytes."""

from typing import Any

import torch

from laconic.compression.memory import SummaryMemory
from laconic.console import pluralize
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder


def describe_cost(
    memory: SummaryMemory, config: DecoderConfig, dtype: torch.dtype, positions_spent: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the cost of a memory, as JSON and as lines of text; `dtype` is that of the KV cache.

    `positions_spent` is the number of positions that the compression read. Each use of the memory reads fewer positions
    than the text has; from the use number `break_even_uses` on, more is saved than spent (None: never).
    """
    lengths = memory.segment_tokens
    per_segment = memory.vectors_per_segment[lengths > 0]
    tokens = int(lengths.sum())
    vectors = int(memory.valid.sum())
    segments = len(per_segment)
    saved = tokens - vectors
    position_bytes = kv_bytes_per_position(config, dtype)
    data = {
        "num_texts": memory.B,
        "num_tokens": tokens,
        "num_segments": segments,
        "num_vectors": vectors,
        "mean_vectors": vectors / max(segments, 1),
        "min_vectors": int(per_segment.min()) if segments else 0,
        "max_vectors": int(per_segment.max()) if segments else 0,
        "tokens_per_vector": tokens / vectors if vectors else None,
        "file_bytes": memory.num_bytes,
        "text_cache_bytes": tokens * position_bytes,
        "vector_cache_bytes": vectors * position_bytes,
        "positions_spent": positions_spent,
        "positions_saved_per_use": saved,
        "break_even_uses": positions_spent // saved + 1 if saved > 0 else None,
    }
    uses = data["break_even_uses"]
    pays = f"{-saved:,} more; never pays" if uses is None else f"{saved:,} fewer; pays after {pluralize(uses, 'use')}"
    ratio = f", {tokens / vectors:.1f} tokens per vector" if vectors else ""
    dropped = f"; {pluralize(num_empty, 'segment')} left none" if (num_empty := int((per_segment == 0).sum())) else ""
    return data, [
        f"read       {tokens:,} tokens in {pluralize(segments, 'segment')}"
        + (f" of {memory.B:,} texts" if memory.B > 1 else ""),
        f"vectors    {vectors:,}: {data['mean_vectors']:.2f} per segment, {data['min_vectors']} to "
        f"{data['max_vectors']}{ratio}{dropped}",
        f"bytes      {format_bytes(memory.num_bytes)} of vectors; cache {format_bytes(data['vector_cache_bytes'])} in "
        f"place of {format_bytes(data['text_cache_bytes'])}",
        f"positions  {positions_spent:,} read to compress; a prompt reads {pays}",
    ]


def kv_bytes_per_position(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one position of a KV cache: 2 L G E numbers, the keys and values of all layers and heads."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def count_cache_bytes(decoder: Decoder, num_positions: int) -> int:
    """Return the bytes of a KV cache in the dtype of a decoder's weights."""
    return num_positions * kv_bytes_per_position(decoder.config, decoder.dtype)


def format_bytes(n: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:,.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.1f} GiB"
