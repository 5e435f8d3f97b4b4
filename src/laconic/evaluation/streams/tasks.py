"""Evaluate a stateful model on streams: recall, copying, strings, needles and text, with and without weight updates.

Every item is read on a fork of the state before it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.evaluation.results_store import EvalMetadata, EvalRecord, ProgressCallback, run_resumable
from laconic.evaluation.streams.evaluate import (
    CacheAsState,
    StreamCondition,
    StreamItem,
    StreamItemResult,
    count_level_updates,
    fork_state,
    items_from_records,
    score_tokens,
)
from laconic.evaluation.streams.metrics import score_copying, score_languages, score_mqar, score_needle
from laconic.evaluation.streams.passages import evaluate_passages, group_rows_by_text, load_documents
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested import state as fast_weights
from laconic.nested.state import FastWeightState

StreamName = Literal["mqar", "copying", "formal_languages", "needle", "ppl"]
SCORERS = {"mqar": score_mqar, "copying": score_copying, "formal_languages": score_languages, "needle": score_needle}


def list_conditions(model: StatefulLM, name: StreamName) -> tuple[StreamCondition, ...]:
    """Return the conditions of a stream: weight updates on and off, and for text the state carried and reset.

    A plain decoder has one condition: its cache cannot be switched off and is always reset.
    """
    if isinstance(model, CacheAsState):
        return (StreamCondition("lm", update_weights=False),)
    updates = (("learn", True), ("frozen", False))
    if name != "ppl":
        return tuple(StreamCondition(*update) for update in updates)
    states = (("carry", True), ("reset", False))
    return tuple(StreamCondition(f"{a}, {b}", learn, carry) for a, learn in updates for b, carry in states)


def evaluate_items(
    model: StatefulLM, name: StreamName, batch: DocumentBatch, prefix_state: FastWeightState | None
) -> list[StreamItem]:
    """Evaluate independent documents under every condition."""
    results: dict[str, list[StreamItemResult]] = {}
    for condition in list_conditions(model, name):
        state = fork_state(model, prefix_state, batch.B)
        scores = score_tokens(model, batch, state, condition.update_weights, freeze_last_segment=name == "needle")
        metrics = SCORERS[name](batch, scores.nll, scores.correct)
        state_bytes = fast_weights.num_bytes(scores.state) // batch.B
        updates = count_level_updates(scores.state)
        results[condition.name] = [StreamItemResult(*x, state_bytes) for x in zip(metrics, updates, strict=True)]
    return [
        StreamItem(item, {condition: per_item[b] for condition, per_item in results.items()})
        for b, item in enumerate(batch.document_ids)
    ]


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
    metadata: EvalMetadata | None = None,
    folder: Path | None = None,
    extra_files: Mapping[str, str] | None = None,
    progress: ProgressCallback | None = None,
) -> list[StreamItem]:
    """Evaluate every item of a source under every condition.

    Args:
        model: The model.
        name: Which stream it is. The items of "ppl" are whole texts, read passage by passage.
        source: The items.
        device: Device of the model.
        batch_size: Items read at once.
        prefix_state: State of one row that every item starts from.
        bytes_per_token: Bytes of each token id, for the NLL per byte.
        metadata: What is evaluated; needed with `folder`.
        folder: The run's `evaluations` folder; results are stored there and resumed from there.
        extra_files: Text files to store beside the results.
        progress: Called after each batch.

    Raises:
        BusyError: The stored results belong to another evaluation.
        InputError: Passages of a text do not follow one another.
    """
    metadata = metadata or EvalMetadata("streams", name)
    texts = group_rows_by_text(source) if name == "ppl" else [[i] for i in range(len(source))]

    def evaluate(indices: Sequence[int]) -> list[list[EvalRecord]]:
        if name == "ppl":
            conditions, some = list_conditions(model, name), [texts[i] for i in indices]
            items = evaluate_passages(model, source, conditions, some, device, prefix_state, bytes_per_token)
        else:
            items = evaluate_items(model, name, load_documents(source, indices).to(device), prefix_state)
        return [item.to_records(metadata) for item in items]

    records = run_resumable(
        folder,
        metadata,
        len(texts),
        evaluate,
        batch_size=batch_size,
        extra_files=extra_files,
        progress=progress,
    )
    return items_from_records(records)
