"""Describe a memory or state file for `laconic inspect`: its origin, vectors or updates, and size."""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from laconic.cli.compress_kv import loss_lines
from laconic.compression.kv.memory import KVMemory
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import abbreviate_hash, format_setting
from laconic.console import pluralize
from laconic.experiment.from_recipe.untrained_levels import read_untrained_levels, read_writer_metadata
from laconic.experiment.state_report import format_reports, state_file_to_json
from laconic.nested.state_check import translate_structure_errors
from laconic.nested.state_file import read_state_file

MAX_SEGMENTS_LISTED = 24


def describe_memory_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata of a memory file as JSON and as lines. Raises `CorruptArtifactError` (76)."""
    memory = SummaryMemory.load(path)
    metadata = memory.metadata
    documents = list[dict[str, Any]]()
    size = path.stat().st_size
    assert metadata is not None
    for row, lengths in zip(metadata.documents, memory.vectors_per_segment.tolist(), strict=True):
        for document in row:
            vectors = lengths[document.first : document.first + len(document.segments)]
            tokens = {"tokens": document.segments, "vectors": vectors}
            documents.append({"name": document.name, "sha256": document.sha256, **tokens})
    counts = {"texts": memory.B, "vectors": int(memory.valid.sum()), "tokens": int(memory.num_tokens.sum())}
    data = {"schema": 1, "file": str(path), **counts, "bytes": size, "vector_bytes": memory.num_bytes}
    data["metadata"] = {name: value for name, value in asdict(metadata).items() if name != "documents"}
    config = metadata.method.get("compression") or {}
    policy = ", ".join(str(config[key]) for key in ("summary", "length_policy", "memory_policy") if key in config)
    lines = [
        f"{path}: {counts['vectors']:,} vectors of width {memory.D} in {metadata.dtype}, {size:,} bytes",
        f"reader     {abbreviate_hash(metadata.reader)} ({metadata.family}, {metadata.layers} layers, "
        f"width {metadata.width}, vocabulary {metadata.vocab:,}), tokenizer {abbreviate_hash(metadata.tokenizer)}",
        f"method     {policy}; positions {metadata.positions}, bos {metadata.bos}",
        f"written    {metadata.created} by laconic {metadata.laconic}",
        *(line for document in documents for line in document_lines(document)),
    ]
    return data | {"documents": documents}, lines


def document_lines(row: dict[str, Any]) -> list[str]:
    tokens = row["tokens"]
    num_dropped = next((i for i, n in enumerate(row["vectors"]) if n), 0)  # by memory policies such as fifo
    vectors = row["vectors"][num_dropped:]
    more = " …" if len(vectors) > MAX_SEGMENTS_LISTED else ""
    more += f"; no longer any of the first {pluralize(num_dropped, 'segment')}" if num_dropped else ""
    return [
        f"text       {row['name']}: {sum(tokens):,} tokens in {pluralize(len(tokens), 'segment')}, "
        f"{sum(vectors):,} vectors, {sum(vectors) / (len(vectors) or 1):.2f} per segment; sha256 {row['sha256'][:12]}…",
        f"vectors    {' '.join(map(str, vectors[:MAX_SEGMENTS_LISTED]))}{more}",
    ]


def describe_kv_memory_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    memory = KVMemory.load(path)
    metadata, heads, size = memory.metadata, memory.slots, path.stat().st_size
    assert metadata is not None
    counts = {"texts": memory.B, "tokens": memory.sizes[0].tolist(), "slots_per_head": heads.transpose(0, 1).tolist()}
    data = {"schema": 1, "file": str(path), "bytes": size, **counts, "metadata": asdict(metadata)}
    settings = ", ".join(f"{name} {describe_setting(value)}" for name, value in metadata.settings.items())
    lines = [
        f"{path}: {float(memory.num_slots.mean()):,.1f} slots per KV head ({int(heads.min()):,} to "
        f"{int(heads.max()):,}), keys and values in {metadata.dtype}, {size:,} bytes",
        f"model      {abbreviate_hash(metadata.model)} ({metadata.family}, {metadata.layers} layers, "
        f"{metadata.kv_heads} KV heads of {metadata.head_size}), tokenizer {abbreviate_hash(metadata.tokenizer)}",
        f"method     {metadata.method}" + (f"; {settings}" if settings else ""),
        f"written    {metadata.created} by laconic {metadata.laconic}",
    ]
    if metadata.chat:
        lines.append("chat       the text opens a user message; a prompt continues it")
    for document in chain.from_iterable(metadata.documents):
        windows = f" in {len(document.segments):,} windows" if len(document.segments) > 1 else ""
        lines.append(
            f"text       {document.name}: {pluralize(document.tokens, 'token')}{windows}; "
            f"sha256 {document.sha256[:12]}…"
        )
    return data, lines + (loss_lines(metadata.measured) if metadata.measured else [])


def describe_setting(value: object) -> str:
    """Return a setting of a memory's method; one with several parts, as a cartridge has, in brackets."""
    if not isinstance(value, Mapping):
        return format_setting(value)
    return f"({', '.join(f'{name} {format_setting(part)}' for name, part in value.items())})"


def describe_state_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    state, metadata = read_state_file(path)
    with translate_structure_errors(path):
        summary = state_file_to_json(state, metadata)
        size = path.stat().st_size
        chunk_sizes = (metadata.get("source") or {}).get("chunks") or ()
        levels = read_untrained_levels(path)
        writer, checkpoint = "hope", ""
        if levels is not None:
            writer = "levels added to a checkpoint"
            name = read_writer_metadata(path)["checkpoint"][:12]
            checkpoint = f"; checkpoint {name}… with inner_lr {levels.initial_inner_lr:g}"
        lines = [
            f"{path}: fast-weight state of {writer}, {pluralize(len(state.position), 'row')}, "
            f"{summary['tokens']:,} tokens read, {size:,} bytes",
            f"model      {abbreviate_hash(str(summary['model']))}, tokenizer "
            f"{abbreviate_hash(str(summary['tokenizer']))}{checkpoint}",
            f"written    {summary['created'] or 'at an unknown time'} by laconic {summary['version']}",
            *(format_reports(state, chunk_sizes) if chunk_sizes else []),
        ]
        for document in chain.from_iterable(summary["documents"]):
            digest = document["sha256"][:12]
            lines.append(f"text       {document['name']}: {document['tokens']:,} tokens; sha256 {digest}…")
        return {"schema": 1, "file": str(path), "bytes": size, "state": summary}, lines
