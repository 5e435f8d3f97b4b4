"""Cost and savings of a compression, in tokens, positions and bytes."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from laconic.compression.memory import SummaryMemory
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder


def compute_cost(
    memory: SummaryMemory, config: DecoderConfig, dtype: torch.dtype, positions_spent: int
) -> dict[str, Any]:
    """Return what a memory of all texts together took and saves, as JSON; `dtype` is that of the KV cache.

    The decoder read `positions_spent` to compress, and reads `positions_saved_per_use` fewer with each use, so that
    more was saved than spent after `break_even_uses`; None: never.
    """
    spans = memory.segment_tokens
    read = memory.vectors_per_segment[spans > 0]
    tokens, vectors, segments = int(spans.sum()), int(memory.valid.sum()), len(read)
    position = kv_bytes_per_position(config, dtype)
    saved = tokens - vectors
    return {
        "num_texts": memory.B,
        "num_tokens": tokens,
        "num_segments": segments,
        "num_vectors": vectors,
        "mean_vectors": vectors / max(segments, 1),
        "min_vectors": int(read.min()) if segments else 0,
        "max_vectors": int(read.max()) if segments else 0,
        "tokens_per_vector": tokens / vectors if vectors else None,
        "file_bytes": memory.num_bytes,
        "text_cache_bytes": tokens * position,
        "vector_cache_bytes": vectors * position,
        "positions_spent": positions_spent,
        "positions_saved_per_use": saved,
        "break_even_uses": math.floor(positions_spent / saved) + 1 if saved > 0 else None,
    }


def cost_lines(cost: Mapping[str, Any]) -> list[str]:
    """Return the result of `compute_cost` as lines for people."""
    num_texts, ratio, uses = cost["num_texts"], cost["tokens_per_vector"], cost["break_even_uses"]
    of_texts = f" of {num_texts:,} texts" if num_texts > 1 else ""
    per_vector = "" if ratio is None else f", {ratio:.1f} tokens per vector"
    pays = "never pays" if uses is None else f"pays after {pluralize(uses, 'use')}"
    return [
        f"read       {cost['num_tokens']:,} tokens in {pluralize(cost['num_segments'], 'segment')}{of_texts}",
        f"vectors    {cost['num_vectors']:,}: {cost['mean_vectors']:.2f} per segment, {cost['min_vectors']} to "
        f"{cost['max_vectors']}{per_vector}",
        f"bytes      {format_bytes(cost['file_bytes'])} of vectors; cache {format_bytes(cost['vector_cache_bytes'])} "
        f"in place of {format_bytes(cost['text_cache_bytes'])}",
        f"positions  {cost['positions_spent']:,} read to compress; a prompt reads {cost['positions_saved_per_use']:,} "
        f"fewer; {pays}",
    ]


def kv_bytes_per_position(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one position of a KV cache: 2 L G E numbers, the keys and values of all layers and heads."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def count_cache_bytes(decoder: Decoder, num_positions: int) -> int:
    """Return the bytes of a KV cache in the dtype of a decoder's weights."""
    return num_positions * kv_bytes_per_position(decoder.config, decoder.token_embedding.weight.dtype)


def pluralize(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def format_bytes(n: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:,.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.1f} GiB"
