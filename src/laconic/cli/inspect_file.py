"""Describe a memory file for `laconic inspect`: its origin, vectors per segment, and size."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.compression.memory import SummaryMemory

MAX_SEGMENTS_LISTED = 24


def describe_memory_file(path: Path, format: str) -> int:
    """Print the metadata of a memory file without loading a model. Raises `CorruptArtifactError` (76)."""
    from laconic.compression.memory import SummaryMemory

    memory = SummaryMemory.load(path)
    if format == "json":
        print(json.dumps(memory_to_json(path, memory), ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(memory_lines(path, memory)))
    return 0


def document_rows(memory: "SummaryMemory") -> list[dict[str, Any]]:
    """Return each document with its tokens and vectors per segment."""
    assert memory.metadata is not None
    rows: list[dict[str, Any]] = []
    for documents, lengths in zip(memory.metadata.documents, memory.vectors_per_segment.tolist(), strict=True):
        for document in documents:
            vectors = lengths[document.first : document.first + len(document.segments)]
            tokens = {"tokens": document.segments, "vectors": vectors}
            rows.append({"name": document.name, "sha256": document.sha256, **tokens})
    return rows


def memory_to_json(path: Path, memory: "SummaryMemory") -> dict[str, Any]:
    """Return the metadata as JSON."""
    assert memory.metadata is not None
    metadata = memory.metadata.to_json()
    del metadata["documents"]
    counts = {"texts": memory.B, "vectors": int(memory.valid.sum()), "tokens": int(memory.num_tokens.sum())}
    sizes = {"bytes": path.stat().st_size, "vector_bytes": memory.num_bytes}
    return {
        "schema": 1, "file": str(path), **counts, **sizes, "metadata": metadata, "documents": document_rows(memory)
    }  # fmt: skip


def memory_lines(path: Path, memory: "SummaryMemory") -> list[str]:
    """Return the metadata as lines for people."""
    from laconic.compression.memory_file import abbreviate_hash

    metadata = memory.metadata
    assert metadata is not None
    config = metadata.method["compression"]
    policy = ", ".join(str(config[key]) for key in ("summary", "length_policy", "memory_policy") if key in config)
    return [
        f"{path}: {int(memory.valid.sum()):,} vectors of width {memory.D} in {metadata.dtype}, "
        f"{path.stat().st_size:,} bytes",
        f"reader     {abbreviate_hash(metadata.reader)} ({metadata.family}, {metadata.layers} layers, "
        f"width {metadata.width}, vocabulary {metadata.vocab:,}), tokenizer {abbreviate_hash(metadata.tokenizer)}",
        f"method     {policy}; positions {metadata.positions}, bos {metadata.bos}",
        f"written    {metadata.created} by laconic {metadata.laconic}",
        *(line for row in document_rows(memory) for line in document_lines(row)),
    ]


def document_lines(row: dict[str, Any]) -> list[str]:
    """Return the lines of one document."""
    vectors, tokens = row["vectors"], row["tokens"]
    more = " …" if len(vectors) > MAX_SEGMENTS_LISTED else ""
    mean = sum(vectors) / max(len(vectors), 1)
    return [
        f"text       {row['name']}: {sum(tokens):,} tokens in {len(tokens):,} segments, {sum(vectors):,} vectors, "
        f"{mean:.2f} per segment; sha256 {row['sha256'][:12]}…",
        f"vectors    {' '.join(map(str, vectors[:MAX_SEGMENTS_LISTED]))}{more}",
    ]
