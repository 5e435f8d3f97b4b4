"""Read whole texts: their perplexity passage by passage, or as books, whose sections are partly held out.

Passages are read with the state carried over or reset. A book is a run of sections, which are rows of a source; every
fifth is held out, and scored on a fork of the state before the book, after it, and after it and another one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.errors import InputError
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.streams.evaluate import StreamCondition, build_metrics, count_level_updates, score_tokens
from laconic.evaluation.streams.metrics import MetricSums, merge_sums, score_passage
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested import state as fast_weights
from laconic.nested.state import FastWeightState, LayerState

NAME_BATCH = 64  # rows loaded at once to read their names
HELD_OUT_EVERY = 5
FRESH, AFTER_READING, AFTER_OTHER_BOOK = "fresh", "after", "after another"


class Book(NamedTuple):
    """Rows of a book's sections: those that are read, and those held out."""

    read: list[int]
    held_out: list[int]


def load_documents(source: TrainingData, rows: Sequence[int]) -> DocumentBatch:
    return cast(DocumentBatch, source.batch(rows, 0, 0))


def group_rows_by_text(source: TrainingData) -> dict[str, list[int]]:
    """Return the rows of each text in order, by its name; rows are named TEXT@START."""
    texts: dict[str, list[tuple[int, int, int]]] = {}
    for start in range(0, len(source), NAME_BATCH):
        rows = range(start, min(start + NAME_BATCH, len(source)))
        batch = load_documents(source, rows)
        for row, name, length in zip(rows, batch.document_ids, batch.attention_mask.sum(1).tolist(), strict=True):
            text, _, position = name.rpartition("@")
            texts.setdefault(text, []).append((int(position), length, row))
    for text, passages in texts.items():
        passages.sort()
        ends = [position + length for position, length, _ in passages]
        starts = [position for position, _, _ in passages]
        if starts != [0, *ends[:-1]]:
            raise InputError(f"{text}: its passages do not follow one another from the start; evaluate all its rows")
    return {text: [row for _, _, row in passages] for text, passages in texts.items()}


def read_passages(
    condition: StreamCondition,
    source: TrainingData,
    texts: Sequence[Sequence[int]],
    device: torch.device,
    bytes_per_token: Tensor | None,
) -> list[dict[str, Any]]:
    """Read texts side by side under one condition; texts that have ended drop out of the batch."""
    sums: list[list[MetricSums]] = [[] for _ in texts]
    updates: list[list[tuple[float, ...]]] = [[] for _ in texts]
    rows = list(range(len(texts)))
    state = condition.model.initial_state(len(texts))
    state_bytes = [0] * len(texts)
    for n in range(max(map(len, texts))):
        active = [b for b in rows if n < len(texts[b])]
        batch = load_documents(source, [texts[b][n] for b in active]).to(device)
        if condition.carry_state:
            state = fast_weights.select_rows(state, [rows.index(b) for b in active])
        else:
            state = condition.model.initial_state(len(active))
        starts = state.position.tolist()
        scores = score_tokens(condition.model, batch, state, condition.update_weights)
        rows = active
        state = drop_cache(scores.state)
        for row, (b, passage_updates) in enumerate(zip(active, count_level_updates(state), strict=True)):
            sums[b].append(score_passage(batch.targets[row], scores.nll[row], starts[row], bytes_per_token))
            updates[b] = [passage_updates] if condition.carry_state else [*updates[b], passage_updates]
            state_bytes[b] = fast_weights.num_bytes(scores.state) // len(active)
    totals = [tuple(sum(level) for level in zip(*per_passage, strict=True)) for per_passage in updates]
    columns = zip(sums, totals, state_bytes, strict=True)
    return [build_metrics(merge_sums(parts), total, num_bytes) for parts, total, num_bytes in columns]


def drop_cache(state: FastWeightState) -> FastWeightState:
    """Return the same fast weights with empty KV caches: attention sees one passage at a time, as in training."""
    return replace(state, layers=empty_caches(state.layers))


def empty_caches(layers: Sequence[LayerState]) -> tuple[LayerState, ...]:
    return tuple(layer if layer.cache is None else replace(layer, cache=layer.cache.crop(0)) for layer in layers)


def split_sections(text: Sequence[int], name: str) -> Book:
    """Split the rows of a book. Raises `InputError` with its name if it is too short to hold out a section."""
    held_out = [*text[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]]
    if not held_out:
        raise InputError(
            f"{name}: {len(text)} sections, but every {HELD_OUT_EVERY}th is held out; give longer texts or more rows"
        )
    return Book([row for row in text if row not in held_out], held_out)


def read_sections(
    model: StatefulLM, source: TrainingData, rows: Sequence[int], state: FastWeightState, device: torch.device
) -> FastWeightState:
    for row in rows:
        state = drop_cache(score_tokens(model, load_documents(source, [row]).to(device), state, True).state)
    return state


def evaluate_book(
    model: StatefulLM,
    source: TrainingData,
    book: Book,
    other: Book | None,
    device: torch.device,
    bytes_per_token: Tensor | None = None,
) -> list[EvalItem]:
    """Return an item per held-out section of a book.

    Sections are read from a fresh state, after the book's other sections, and after as many of another book, if any.
    """
    fresh = model.initial_state(1)
    after = read_sections(model, source, book.read, fresh, device)
    states = {FRESH: fresh, AFTER_READING: after}
    if other is not None:
        states[AFTER_OTHER_BOOK] = read_sections(model, source, other.read[: len(book.read)], after, device)
    items: list[EvalItem] = []
    for row in book.held_out:
        section = load_documents(source, [row]).to(device)
        metrics = {name: score_section(model, section, state, bytes_per_token) for name, state in states.items()}
        items.append(EvalItem(section.document_ids[0], metrics))
    return items


def score_section(
    model: StatefulLM, section: DocumentBatch, state: FastWeightState, bytes_per_token: Tensor | None
) -> dict[str, Any]:
    """Score a section on a fork; level updates and bytes are those of the state before it.

    If attention sees the whole section, because it is one segment, weights are not updated on it.
    """
    scores = score_tokens(model, section, state, True, freeze_last_segment=len(section.segment_slices) == 1)
    sums = score_passage(section.targets[0], scores.nll[0], 0, bytes_per_token)
    without_positions = {name: x for name, x in sums.items() if not name[0].isdigit()}
    return build_metrics(without_positions, count_level_updates(state)[0], fast_weights.num_bytes(state))
