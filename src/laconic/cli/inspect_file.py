"""What `laconic inspect` says of a memory's file: where it comes from, vectors by segment, bytes."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.compression.memory import SummaryMemory

MAX_SEGMENTS_LISTED = 24  # segments of a text whose vectors are told one by one


def describe_memory_file(path: Path, format: str) -> int:
    """Prints it; no run is needed. Raises `Damaged` (76) for what is no sound memory."""
    from laconic.compression.memory import SummaryMemory

    memory = SummaryMemory.load(path)
    if format == "json":
        print(json.dumps(memory_to_json(path, memory), ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(memory_lines(path, memory)))
    return 0


def document_rows(memory: "SummaryMemory") -> list[dict[str, Any]]:
    """Each text with its tokens and its vectors, by segment."""
    assert memory.metadata is not None
    found: list[dict[str, Any]] = []
    for documents, lengths in zip(memory.metadata.documents, memory.vectors_per_segment.tolist(), strict=True):
        found += [
            {
                "name": each.name,
                "sha256": each.sha256,
                "tokens": each.segments,
                "vectors": lengths[each.first : each.first + len(each.segments)],
            }
            for each in documents
        ]
    return found


def memory_to_json(path: Path, memory: "SummaryMemory") -> dict[str, Any]:
    """As JSON has it."""
    assert memory.metadata is not None
    about = memory.metadata.to_json()
    del about["documents"]
    counts = {"texts": memory.B, "vectors": int(memory.valid.sum()), "tokens": int(memory.num_tokens.sum())}
    sizes = {"bytes": path.stat().st_size, "vector_bytes": memory.num_bytes}
    return {"schema": 1, "mixer": str(path), **counts, **sizes, "provenance": about, "documents": document_rows(memory)}


def memory_lines(path: Path, memory: "SummaryMemory") -> list[str]:
    """As a person reads it."""
    from laconic.compression.memory_file import abbreviate_hash

    about = memory.metadata
    assert about is not None
    config = about.method["compression"]
    told = ", ".join(str(config[key]) for key in ("summary", "length_policy", "memory_policy") if key in config)
    return [
        f"{path}: {int(memory.valid.sum()):,} vectors of width {memory.D} in {about.dtype}, "
        f"{path.stat().st_size:,} bytes",
        f"reader     {abbreviate_hash(about.reader)} ({about.family}, {about.layers} layers, width {about.width}, "
        f"{about.vocab:,} words), tokenizer {abbreviate_hash(about.tokenizer)}",
        f"method     {told}; positions {about.positions}, bos {about.bos}",
        f"written    {about.created} by laconic {about.laconic}",
        *(line for row in document_rows(memory) for line in document_lines(row)),
    ]


def document_lines(row: dict[str, Any]) -> list[str]:
    """Of one text."""
    vectors, tokens = row["vectors"], row["tokens"]
    shown = " ".join(map(str, vectors[:MAX_SEGMENTS_LISTED])) + (" …" if len(vectors) > MAX_SEGMENTS_LISTED else "")
    mean = sum(vectors) / max(len(vectors), 1)
    return [
        f"text       {row['name']}: {sum(tokens):,} tokens in {len(tokens):,} segments, {sum(vectors):,} vectors, "
        f"{mean:.2f} a segment; sha256 {row['sha256'][:12]}…",
        f"vectors    {shown}",
    ]
