"""Cost and savings of a compression, in tokens, positions and bytes."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from laconic.compression.memory import SummaryMemory
from laconic.console import pluralize
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder


@dataclass(frozen=True)
class CompressionCost:
    """Tokens, vectors and bytes of all compressed texts together.

    Attributes:
        file_bytes: Bytes of the vectors in a file.
        text_cache_bytes: Bytes of the KV cache of the text, 2 L G E numbers per position.
        vector_cache_bytes: Bytes of the KV cache of the vectors.
        positions_spent: Positions that the decoder read to compress.
        positions_saved_per_use: Positions that each use no longer reads.
        break_even_uses: Number of uses after which more was saved than spent; None: never.
    """

    num_texts: int
    num_tokens: int
    num_segments: int
    num_vectors: int
    mean_vectors: float
    min_vectors: int
    max_vectors: int
    tokens_per_vector: float | None
    file_bytes: int
    text_cache_bytes: int
    vector_cache_bytes: int
    positions_spent: int
    positions_saved_per_use: int
    break_even_uses: int | None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    def to_lines(self) -> list[str]:
        ratio = "" if self.tokens_per_vector is None else f", {self.tokens_per_vector:.1f} tokens per vector"
        break_even = (
            "never pays" if self.break_even_uses is None else f"pays after {pluralize(self.break_even_uses, 'use')}"
        )
        return [
            f"read       {self.num_tokens:,} tokens in {pluralize(self.num_segments, 'segment')}"
            + (f" of {self.num_texts:,} texts" if self.num_texts > 1 else ""),
            f"vectors    {self.num_vectors:,}: {self.mean_vectors:.2f} per segment, "
            f"{self.min_vectors} to {self.max_vectors}{ratio}",
            f"bytes      {format_bytes(self.file_bytes)} of vectors; cache {format_bytes(self.vector_cache_bytes)} "
            f"in place of {format_bytes(self.text_cache_bytes)}",
            f"positions  {self.positions_spent:,} read to compress; a prompt reads {self.positions_saved_per_use:,} "
            f"fewer; {break_even}",
        ]


def compute_cost(
    memory: SummaryMemory, config: DecoderConfig, dtype: torch.dtype, positions_spent: int
) -> CompressionCost:
    """Return the cost of a memory; `dtype` is that of the KV cache."""
    spans = memory.segment_tokens
    read = memory.vectors_per_segment[spans > 0]
    tokens, vectors, segments = int(spans.sum()), int(memory.valid.sum()), len(read)
    position = kv_bytes_per_position(config, dtype)
    saved = tokens - vectors
    return CompressionCost(
        num_texts=memory.B,
        num_tokens=tokens,
        num_segments=segments,
        num_vectors=vectors,
        mean_vectors=vectors / max(segments, 1),
        min_vectors=int(read.min()) if segments else 0,
        max_vectors=int(read.max()) if segments else 0,
        tokens_per_vector=tokens / vectors if vectors else None,
        file_bytes=memory.num_bytes,
        text_cache_bytes=tokens * position,
        vector_cache_bytes=vectors * position,
        positions_spent=positions_spent,
        positions_saved_per_use=saved,
        break_even_uses=math.floor(positions_spent / saved) + 1 if saved > 0 else None,
    )


def kv_bytes_per_position(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one position of a KV cache: 2 L G E numbers, the keys and values of all layers and heads."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def count_cache_bytes(decoder: Decoder, num_positions: int) -> int:
    """Return the bytes of a KV cache in the dtype of a decoder's weights."""
    return num_positions * kv_bytes_per_position(decoder.config, decoder.token_embedding.weight.dtype)


def format_bytes(n: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:,.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.1f} GiB"
