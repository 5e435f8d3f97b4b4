"""What `laconic inspect` says of a memory's file: where it comes from, vectors by segment, bytes."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.core.memory import Memory

SHOWN = 24  # segments of a text whose vectors are told one by one


def described(path: Path, format: str) -> int:
    """Prints it; no run is needed. Raises `Damaged` (76) for what is no sound memory."""
    from laconic.core.memory import Memory

    memory = Memory.load(path)
    if format == "json":
        print(json.dumps(plain(path, memory), ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(lines(path, memory)))
    return 0


def rows(memory: "Memory") -> list[dict[str, Any]]:
    """Each text with its tokens and its vectors, by segment."""
    assert memory.provenance is not None
    found: list[dict[str, Any]] = []
    for documents, lengths in zip(memory.provenance.documents, memory.block_lengths.tolist(), strict=True):
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


def plain(path: Path, memory: "Memory") -> dict[str, Any]:
    """As JSON has it."""
    assert memory.provenance is not None
    about = memory.provenance.plain()
    del about["documents"]
    counts = {"texts": memory.B, "vectors": int(memory.live.sum()), "tokens": int(memory.tokens.sum())}
    sizes = {"bytes": path.stat().st_size, "vector_bytes": memory.bytes}
    return {"schema": 1, "memory": str(path), **counts, **sizes, "provenance": about, "documents": rows(memory)}


def lines(path: Path, memory: "Memory") -> list[str]:
    """As a person reads it."""
    from laconic.core.provenance import short

    about = memory.provenance
    assert about is not None
    reading = about.method["reading"]
    told = ", ".join(str(reading[key]) for key in ("generator", "length", "memory") if key in reading)
    return [
        f"{path}: {int(memory.live.sum()):,} vectors of width {memory.D} in {about.dtype}, "
        f"{path.stat().st_size:,} bytes",
        f"reader     {short(about.reader)} ({about.family}, {about.layers} layers, width {about.width}, "
        f"{about.vocab:,} words), tokenizer {short(about.tokenizer)}",
        f"method     {told}; positions {about.positions}, bos {about.bos}",
        f"written    {about.created} by laconic {about.laconic}",
        *(line for row in rows(memory) for line in text_lines(row)),
    ]


def text_lines(row: dict[str, Any]) -> list[str]:
    """Of one text."""
    vectors, tokens = row["vectors"], row["tokens"]
    shown = " ".join(map(str, vectors[:SHOWN])) + (" …" if len(vectors) > SHOWN else "")
    mean = sum(vectors) / max(len(vectors), 1)
    return [
        f"text       {row['name']}: {sum(tokens):,} tokens in {len(tokens):,} segments, {sum(vectors):,} vectors, "
        f"{mean:.2f} a segment; sha256 {row['sha256'][:12]}…",
        f"vectors    {shown}",
    ]
