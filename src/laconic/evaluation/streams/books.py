"""Read books once: NLL of held-out sections before, after, and after another book; the effect of each level.

Nested Learning arXiv:2512.24695, Table 6 for the levels. A book is a run of sections, which are rows of a source; every
fifth is held out. Held-out sections are read on a fork of the state.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.errors import InputError
from laconic.evaluation.results_store import EvalMetadata, EvalRecord, ProgressCallback, run_resumable
from laconic.evaluation.streams.evaluate import (
    StreamCondition,
    StreamItem,
    StreamItemResult,
    count_level_updates,
    items_from_records,
    score_tokens,
)
from laconic.evaluation.streams.metrics import OVERALL, score_passage
from laconic.evaluation.streams.passages import (
    drop_cache,
    evaluate_passages,
    group_rows_by_text,
    load_documents,
    text_name,
)
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested import state as fast_weights
from laconic.nested.state import FastWeightState

HELD_OUT_EVERY = 5
FRESH, AFTER_READING, AFTER_OTHER_BOOK = "fresh", "after", "after another"


class PairedGain(NamedTuple):
    """NLL per token that a condition saves against another, mean over items, with its standard error."""

    condition: str
    baseline: str
    nats_saved: float
    standard_error: float
    num_items: int


def split_sections(text: Sequence[int], name: str) -> tuple[list[int], list[int]]:
    """Split the sections of a book into those that are read and those held out.

    Raises:
        InputError: There are fewer than five sections.
    """
    held_out = [*text[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]]
    if not held_out:
        raise InputError(
            f"{name}: {len(text)} sections, but every {HELD_OUT_EVERY}th is held out; give longer texts or more rows"
        )
    return [row for row in text if row not in held_out], held_out


def read_sections(
    model: StatefulLM, source: TrainingData, rows: Sequence[int], state: FastWeightState, device: torch.device
) -> FastWeightState:
    """Return the state after reading sections in order."""
    for row in rows:
        state = drop_cache(score_tokens(model, load_documents(source, [row]).to(device), state, True).state)
    return state


def evaluate_book(
    model: StatefulLM,
    source: TrainingData,
    text: Sequence[int],
    other: Sequence[int] | None,
    device: torch.device,
    bytes_per_token: Tensor | None = None,
) -> list[StreamItem]:
    """Evaluate the held-out sections of a book.

    Args:
        model: The model.
        source: The sections.
        text: Rows of the book.
        other: Rows of another book to read in between, or None.
        device: Device of the model.
        bytes_per_token: Bytes of each token id.

    Returns:
        One item per held-out section: from a fresh state, after the book's other sections, and after as many sections
        of the other book.
    """
    sections, held_out = split_sections(text, text_name(source, text[0]))
    fresh = model.initial_state(1)
    after = read_sections(model, source, sections, fresh, device)
    states = {FRESH: fresh, AFTER_READING: after}
    if other is not None:
        between, _ = split_sections(other, text_name(source, other[0]))
        states[AFTER_OTHER_BOOK] = read_sections(model, source, between[: len(sections)], after, device)
    items: list[StreamItem] = []
    for row in held_out:
        section = load_documents(source, [row]).to(device)
        results = {name: score_section(model, section, state, bytes_per_token) for name, state in states.items()}
        items.append(StreamItem(section.document_ids[0], results))
    return items


def score_section(
    model: StatefulLM, section: DocumentBatch, state: FastWeightState, bytes_per_token: Tensor | None
) -> StreamItemResult:
    """Score a section on a fork; level updates and bytes are those of the state before it.

    Weights are not updated on the section where attention sees it anyway.
    """
    scores = score_tokens(model, section, state, True, freeze_last_segment=len(section.segment_slices) == 1)
    (sums,) = score_passage(section, scores.nll, torch.zeros_like(state.position), bytes_per_token)
    without_positions = {name: x for name, x in sums.items() if not name[0].isdigit()}
    return StreamItemResult(without_positions, count_level_updates(state)[0], fast_weights.num_bytes(state))


@torch.no_grad()
def evaluate_books(
    model: StatefulLM,
    source: TrainingData,
    device: torch.device,
    *,
    bytes_per_token: Tensor | None = None,
    metadata: EvalMetadata | None = None,
    folder: Path | None = None,
    extra_files: Mapping[str, str] | None = None,
    progress: ProgressCallback | None = None,
) -> list[StreamItem]:
    """Evaluate the held-out sections of every book, with the next book in between if there is one.

    The arguments are those of `evaluate_stream`.

    Raises:
        InputError: A text has fewer than five sections.
    """
    metadata, books = metadata or EvalMetadata("streams", "books"), group_rows_by_text(source)
    for book in books:
        split_sections(book, text_name(source, book[0]))

    def evaluate(indices: Sequence[int]) -> list[list[EvalRecord]]:
        units: list[list[EvalRecord]] = []
        for i in indices:
            other = books[(i + 1) % len(books)] if len(books) > 1 else None
            items = evaluate_book(model, source, books[i], other, device, bytes_per_token)
            units.append([record for item in items for record in item.to_records(metadata)])
        return units

    records = run_resumable(
        folder, metadata, len(books), evaluate, batch_size=1, extra_files=extra_files, progress=progress
    )
    return items_from_records(records)


@torch.no_grad()
def evaluate_levels(
    models: Mapping[str, StatefulLM],
    source: TrainingData,
    device: torch.device,
    *,
    bytes_per_token: Tensor | None = None,
    metadata: EvalMetadata | None = None,
    folder: Path | None = None,
    extra_files: Mapping[str, str] | None = None,
    progress: ProgressCallback | None = None,
) -> list[StreamItem]:
    """Read books in order with a model and with its ablations, each under its name.

    The first model is also read without weight updates. The other arguments are those of `evaluate_stream`.
    """
    metadata, books = metadata or EvalMetadata("streams", "levels"), group_rows_by_text(source)
    first = next(iter(models))
    conditions = [(model, StreamCondition(name, True, True)) for name, model in models.items()]
    conditions.append((models[first], StreamCondition(f"{first}, frozen", False, True)))

    def evaluate(indices: Sequence[int]) -> list[list[EvalRecord]]:
        some = [books[i] for i in indices]
        per_condition = [
            evaluate_passages(model, source, [condition], some, device, None, bytes_per_token)
            for model, condition in conditions
        ]
        return [
            [record for item in items for record in item.to_records(metadata)]
            for items in zip(*per_condition, strict=True)
        ]

    records = run_resumable(
        folder, metadata, len(books), evaluate, batch_size=1, extra_files=extra_files, progress=progress
    )
    return items_from_records(records)


def compute_paired_gains(items: Sequence[Sequence[StreamItem]], baseline: str) -> list[PairedGain]:
    """Return what each condition saves against a baseline, paired by item.

    Args:
        items: The items of each seed; an item counts with its mean over seeds.
        baseline: Name of the baseline condition.

    Returns:
        One gain per other condition. A standard error over the sections of a few books is of those books only.
    """

    def mean_nll(item: StreamItem, condition: str) -> float:
        total, n = item.conditions[condition].sums[OVERALL]
        return total / n

    gains: list[PairedGain] = []
    for condition in items[0][0].conditions:
        if condition == baseline:
            continue
        per_seed = [[mean_nll(item, baseline) - mean_nll(item, condition) for item in seed] for seed in items]
        saved = np.mean(per_seed, axis=0)
        se = float(np.std(saved, ddof=1) / math.sqrt(len(saved))) if len(saved) > 1 else math.nan
        gains.append(PairedGain(condition, baseline, float(np.mean(saved)), se, len(saved)))
    return gains


def retained_share(gains: Sequence[PairedGain]) -> float | None:
    """Return the share of what reading a book saves that is left after another book."""
    saved = {gain.condition: gain.nats_saved for gain in gains}
    if AFTER_READING not in saved or AFTER_OTHER_BOOK not in saved or saved[AFTER_READING] <= 0:
        return None
    return saved[AFTER_OTHER_BOOK] / saved[AFTER_READING]
