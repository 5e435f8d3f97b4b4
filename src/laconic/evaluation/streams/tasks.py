"""Streams a model that learns while it reads is measured on: recall, copies, strings, needles, text; learning or not.

An item is read on a fork of the state before it, and changes nothing.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.evaluation import line_store as results_store
from laconic.evaluation.streams.evaluate import (
    CacheAsState,
    StreamCondition,
    StreamItemResult,
    StreamRecord,
    count_level_updates,
    fork_state,
    parse_stream_record,
    score_tokens,
)
from laconic.evaluation.streams.metrics import score_copying, score_languages, score_mqar, score_needle
from laconic.evaluation.streams.passages import evaluate_passages, group_rows_by_text
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested import state as values
from laconic.nested.state import FastWeightState
from laconic.storage.strict_json import to_canonical_json

StreamName = Literal["mqar", "copying", "formal_languages", "needle", "ppl"]
SCORERS = {"mqar": score_mqar, "copying": score_copying, "formal_languages": score_languages, "needle": score_needle}


def list_conditions(model: StatefulLM, name: StreamName) -> tuple[StreamCondition, ...]:
    """Learning on and off, and for text carried and reset; a cache cannot be turned off, and begins anew."""
    if isinstance(model, CacheAsState):
        return (StreamCondition("plain", update_weights=False),)
    each = (("learn", True), ("still", False))
    if name != "ppl":
        return tuple(StreamCondition(*one) for one in each)
    ends = (("carry", True), ("reset", False))
    return tuple(StreamCondition(f"{way}, {end}", learn, carry) for way, learn in each for end, carry in ends)


def evaluate_items(
    model: StatefulLM, name: StreamName, batch: DocumentBatch, prefix_state: FastWeightState | None
) -> list[StreamRecord]:
    """Documents that stand alone, each in every way."""
    said: dict[str, list[StreamItemResult]] = {}
    for way in list_conditions(model, name):
        got = score_tokens(
            model,
            batch,
            fork_state(model, prefix_state, batch.B),
            way.update_weights,
            freeze_last_segment=name == "needle",
        )
        cells, size = SCORERS[name](batch, got.nll, got.correct), values.num_bytes(got.state) // batch.B
        said[way.name] = [
            StreamItemResult(*each, size) for each in zip(cells, count_level_updates(got.state), strict=True)
        ]
    return [StreamRecord(id, {way: each[b] for way, each in said.items()}) for b, id in enumerate(batch.document_ids)]


@torch.no_grad()
def evaluate_stream(
    model: StatefulLM,
    name: StreamName,
    source: TrainingData,
    device: torch.device,
    *,
    batch_size: int,
    prefix_state: FastWeightState | None = None,
    bytes_per_token: Tensor | None = None,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    extra_files: Mapping[str, str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[StreamRecord]:
    """Every item of a source in every way, `batch` at once; those of ppl are whole texts, read stretch by stretch.

    `before` is the state of one row that each item begins on. `bytes_of` are the bytes of each id, for nats a byte.
    With a `folder` rows are kept as `evaluation.kept` says; `key` is what they are of beside the data. Raises `Busy`
    (73) for a folder of another key, `BadInput` (66) for stretches that do not follow one another.
    """
    ways = list_conditions(model, name)
    books = group_rows_by_text(source) if name == "ppl" else [[i] for i in range(len(source))]
    said = {"data": source.fingerprint, "items": str(len(books)), "stream": name}
    said |= {"ways": "; ".join(way.name for way in ways)}

    def made(places: range) -> list[str]:
        if name == "ppl":
            rows = evaluate_passages(
                model, source, ways, [books[i] for i in places], device, prefix_state, bytes_per_token
            )
        else:
            rows = evaluate_items(model, name, cast(DocumentBatch, source.batch(places, 0, 0)).to(device), prefix_state)
        return [row.to_json_line() for row in rows]

    mark = to_canonical_json({**(key or {}), **said})
    return [
        parse_stream_record(line)
        for line in results_store.run_resumable(
            folder, mark, len(books), made, batch_size=batch_size, extra_files=extra_files, progress=progress
        )
    ]
