"""Describe a memory or state file for `laconic inspect`: its origin, vectors or updates, and size."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laconic.cli.compress_kv import loss_lines
from laconic.compression.kv.memory import KVMemory
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import abbreviate_hash, format_setting
from laconic.config.nested import CMSConfig
from laconic.console import pluralize
from laconic.experiment.from_recipe.untrained_levels import read_untrained_levels, read_writer_metadata
from laconic.experiment.state_report import format_reports, state_file_to_json
from laconic.nested.state_check import translate_structure_errors
from laconic.nested.state_file import read_state_file

MAX_SEGMENTS_LISTED = 24


def describe_memory_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata of a memory file as JSON and as lines. Raises `CorruptArtifactError` (76)."""
    memory = SummaryMemory.load(path)
    return memory_to_json(path, memory), memory_lines(path, memory)


def document_rows(memory: SummaryMemory) -> list[dict[str, Any]]:
    """Return each document with its tokens and vectors per segment."""
    assert memory.metadata is not None
    rows: list[dict[str, Any]] = []
    for documents, lengths in zip(memory.metadata.documents, memory.vectors_per_segment.tolist(), strict=True):
        for document in documents:
            vectors = lengths[document.first : document.first + len(document.segments)]
            tokens = {"tokens": document.segments, "vectors": vectors}
            rows.append({"name": document.name, "sha256": document.sha256, **tokens})
    return rows


def memory_to_json(path: Path, memory: SummaryMemory) -> dict[str, Any]:
    assert memory.metadata is not None
    metadata = asdict(memory.metadata)
    del metadata["documents"]
    counts = {"texts": memory.B, "vectors": int(memory.valid.sum()), "tokens": int(memory.num_tokens.sum())}
    sizes = {"bytes": path.stat().st_size, "vector_bytes": memory.num_bytes}
    return {
        "schema": 1, "file": str(path), **counts, **sizes, "metadata": metadata, "documents": document_rows(memory)
    }  # fmt: skip


def memory_lines(path: Path, memory: SummaryMemory) -> list[str]:
    metadata = memory.metadata
    assert metadata is not None
    config = metadata.method.get("compression") or {}
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
    vectors, tokens = row["vectors"], row["tokens"]
    more = " …" if len(vectors) > MAX_SEGMENTS_LISTED else ""
    mean = sum(vectors) / max(len(vectors), 1)
    return [
        f"text       {row['name']}: {sum(tokens):,} tokens in {len(tokens):,} segments, {sum(vectors):,} vectors, "
        f"{mean:.2f} per segment; sha256 {row['sha256'][:12]}…",
        f"vectors    {' '.join(map(str, vectors[:MAX_SEGMENTS_LISTED]))}{more}",
    ]


def describe_kv_memory_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata and sizes of a KV memory as JSON and as lines. Raises `CorruptArtifactError` (76)."""
    memory = KVMemory.load(path)
    assert memory.metadata is not None
    heads = [[list(map(int, layer)) for layer in row] for row in memory.slots.transpose(0, 1)]
    counts = {"texts": memory.B, "tokens": list(map(int, memory.num_tokens)), "slots_per_head": heads}
    data = {"schema": 1, "file": str(path), "bytes": path.stat().st_size, **counts}
    return data | {"metadata": asdict(memory.metadata)}, kv_memory_lines(path, memory)


def kv_memory_lines(path: Path, memory: KVMemory) -> list[str]:
    metadata, heads = memory.metadata, memory.slots
    assert metadata is not None
    settings = ", ".join(f"{name} {describe_setting(value)}" for name, value in metadata.settings.items())
    lines = [
        f"{path}: {float(memory.num_slots.mean()):,.1f} slots per KV head ({int(heads.min()):,} to "
        f"{int(heads.max()):,}), keys and values in {metadata.dtype}, {path.stat().st_size:,} bytes",
        f"model      {abbreviate_hash(metadata.model)} ({metadata.family}, {metadata.layers} layers, "
        f"{metadata.kv_heads} KV heads of {metadata.head_size}), tokenizer {abbreviate_hash(metadata.tokenizer)}",
        f"method     {metadata.method}" + (f"; {settings}" if settings else ""),
        f"written    {metadata.created} by laconic {metadata.laconic}",
    ]
    if metadata.chat:
        lines.append("chat       the text opens a user message; a prompt continues it")
    for document in (document for row in metadata.documents for document in row):
        windows = f" in {len(document.segments):,} windows" if len(document.segments) > 1 else ""
        lines.append(
            f"text       {document.name}: {pluralize(document.tokens, 'token')}{windows}; "
            f"sha256 {document.sha256[:12]}…"
        )
    return lines + (loss_lines(metadata.measured) if metadata.measured else [])


def describe_setting(value: object) -> str:
    """Return a setting of a memory's method; one with several parts, as a cartridge has, in brackets."""
    if not isinstance(value, Mapping):
        return format_setting(value)
    return f"({', '.join(f'{name} {format_setting(part)}' for name, part in value.items())})"


def describe_state_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata of a state file as JSON and as lines. Raises `CorruptArtifactError` (76)."""
    state, metadata = read_state_file(path)
    with translate_structure_errors(path):
        summary = state_file_to_json(state, metadata)
        data = {"schema": 1, "file": str(path), "bytes": path.stat().st_size, "state": summary}
        return data, state_lines(path, state, metadata, summary)


def state_lines(path: Path, state: Any, metadata: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    rows, chunk_sizes = len(state.position), (metadata.get("source") or {}).get("chunks") or ()
    levels = read_untrained_levels(path)
    writer = "hope" if levels is None else "levels added to a checkpoint"
    return [
        f"{path}: fast-weight state of {writer}, {rows} row{'s' * (rows > 1)}, {summary['tokens']:,} tokens read, "
        f"{path.stat().st_size:,} bytes",
        f"model      {abbreviate_hash(str(summary['model']))}, tokenizer "
        f"{abbreviate_hash(str(summary['tokenizer']))}{describe_levels(path, levels)}",
        f"written    {summary['created'] or 'at an unknown time'} by laconic {summary['version']}",
        *(format_reports(state, chunk_sizes) if chunk_sizes else []),
        *(
            f"text       {document['name']}: {document['tokens']:,} tokens; sha256 {document['sha256'][:12]}…"
            for row in summary["documents"]
            for document in row
        ),
    ]


def describe_levels(path: Path, levels: CMSConfig | None) -> str:
    """Return checkpoint and learning rate of a state that a plain checkpoint wrote, else ""."""
    if levels is None:
        return ""
    return f"; checkpoint {read_writer_metadata(path)['checkpoint'][:12]}… with inner_lr {levels.initial_inner_lr:g}"
