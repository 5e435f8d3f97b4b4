"""Read books once: NLL of held-out sections before the book, after it, and after it and another one.

A book is a run of sections, which are rows of a source; every fifth is held out. Held-out sections are read on a
fork of the state.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.errors import InputError
from laconic.evaluation.results_store import EvalItem
from laconic.evaluation.streams.evaluate import build_metrics, count_level_updates, score_tokens
from laconic.evaluation.streams.metrics import score_passage
from laconic.evaluation.streams.passages import drop_cache, load_documents, row_text_name
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested import state as fast_weights
from laconic.nested.state import FastWeightState

HELD_OUT_EVERY = 5
FRESH, AFTER_READING, AFTER_OTHER_BOOK = "fresh", "after", "after another"


def split_sections(text: Sequence[int], name: str) -> tuple[list[int], list[int]]:
    """Split the sections of a book into those that are read and those held out."""
    held_out = [*text[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]]
    if not held_out:
        raise InputError(
            f"{name}: {len(text)} sections, but every {HELD_OUT_EVERY}th is held out; give longer texts or more rows"
        )
    return [row for row in text if row not in held_out], held_out


def read_sections(
    model: StatefulLM, source: TrainingData, rows: Sequence[int], state: FastWeightState, device: torch.device
) -> FastWeightState:
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
) -> list[EvalItem]:
    """Return an item per held-out section of a book, given by its rows.

    Sections are read from a fresh state, after the book's other sections, and after as many of another book, if any.
    """
    sections, held_out = split_sections(text, row_text_name(source, text[0]))
    fresh = model.initial_state(1)
    after = read_sections(model, source, sections, fresh, device)
    states = {FRESH: fresh, AFTER_READING: after}
    if other is not None:
        between, _ = split_sections(other, row_text_name(source, other[0]))
        states[AFTER_OTHER_BOOK] = read_sections(model, source, between[: len(sections)], after, device)
    items: list[EvalItem] = []
    for row in held_out:
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
