"""What a compression cost and what it saves, in tokens, positions and bytes."""

import math
from dataclasses import dataclass
from typing import Any

from laconic.core.families import DecoderConfig
from laconic.core.memory import Memory


@dataclass(frozen=True)
class Bill:
    """Of all texts together: tokens read in segments, the vectors they became, and what both take.

    `file` is bytes of the vectors in a file; `text_cache` and `vector_cache` are bytes of keys and values, 2 L G E a
    position, that text and vectors hold; `spent` are positions that went through the decoder, `saved` those that a use
    no longer reads. `pays_after` is the number of uses from which `saved` is more than `spent`; None: never.
    """

    texts: int
    tokens: int
    segments: int
    vectors: int
    mean: float
    min: int
    max: int
    tokens_per_vector: float | None
    file: int
    text_cache: int
    vector_cache: int
    spent: int
    saved: int
    pays_after: int | None

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return dict(vars(self))

    def lines(self) -> list[str]:
        """As a person reads it."""
        ratio = "" if self.tokens_per_vector is None else f", {self.tokens_per_vector:.1f} tokens a vector"
        pays = "never pays" if self.pays_after is None else f"pays after {times(self.pays_after)}"
        return [
            f"read       {self.tokens:,} tokens in {counted(self.segments, 'segment')}"
            + (f" of {self.texts:,} texts" if self.texts > 1 else ""),
            f"vectors    {self.vectors:,}: {self.mean:.2f} a segment, {self.min} to {self.max}{ratio}",
            f"bytes      {size(self.file)} of vectors; cache {size(self.vector_cache)} in place of "
            f"{size(self.text_cache)}",
            f"positions  {self.spent:,} spent, {self.saved:,} saved each time it is read; {pays}",
        ]


def bill(memory: Memory, config: DecoderConfig, width: int, spent: int) -> Bill:
    """Of a memory with its provenance; `width` is bytes of a number in the cache."""
    spans = memory.spans
    read = memory.block_lengths[spans > 0]
    tokens, vectors, segments = int(spans.sum()), int(memory.live.sum()), len(read)
    position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
    saved = tokens - vectors
    return Bill(
        texts=memory.B,
        tokens=tokens,
        segments=segments,
        vectors=vectors,
        mean=vectors / max(segments, 1),
        min=int(read.min()) if segments else 0,
        max=int(read.max()) if segments else 0,
        tokens_per_vector=tokens / vectors if vectors else None,
        file=memory.bytes,
        text_cache=tokens * position,
        vector_cache=vectors * position,
        spent=spent,
        saved=saved,
        pays_after=math.floor(spent / saved) + 1 if saved > 0 else None,
    )


def counted(n: int, what: str) -> str:
    """A number with its noun."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def times(n: int) -> str:
    """How often."""
    return "1 use" if n == 1 else f"{n:,} uses"


def size(n: float) -> str:
    """Bytes as a person reads them."""
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:,.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.1f} GiB"
