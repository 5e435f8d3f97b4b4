"""Books read once: what is known of them before, after, and with another book in between; what each level is worth.

Nested Learning arXiv:2512.24695, Table 6 for the levels. A book is a run of sections, the rows of a source; every fifth
is held out of the reading. What is scored is read on a fork, and changes nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.errors import InputError
from laconic.evaluation import line_store as results_store
from laconic.evaluation.streams.evaluate import (
    StreamCondition,
    StreamItemResult,
    StreamRecord,
    count_level_updates,
    parse_stream_record,
    score_tokens,
)
from laconic.evaluation.streams.metrics import OVERALL, score_passage
from laconic.evaluation.streams.passages import drop_cache, evaluate_passages, group_rows_by_text
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested import state as values
from laconic.nested.state import FastWeightState
from laconic.storage.strict_json import to_canonical_json

HELD_OUT_EVERY = 5  # of so many sections one is held out
FRESH, AFTER_READING, AFTER_OTHER_BOOK = "fresh", "after", "after another"
ProgressCallback = Callable[[str, int, int], None]


class PairedGain(NamedTuple):
    """Nats a token that a way saves against another, the mean over items, paired, and its standard error."""

    condition: str
    baseline: str
    nats_saved: float
    standard_error: float
    num_items: int


def split_sections(text: Sequence[int], name: str) -> tuple[list[int], list[int]]:
    """The sections that are read, and those held out. Raises `BadInput` (66) for fewer than five."""
    held = [*text[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]]
    if not held:
        raise InputError(
            f"{name}: {len(text)} sections, of which every fifth is held out; give longer texts or more rows"
        )
    return [row for row in text if row not in held], held


def text_name(source: TrainingData, row: int) -> str:
    """The text that a section is of."""
    return cast(DocumentBatch, source.batch([row], 0, 0)).document_ids[0].rpartition("@")[0]


def read_sections(
    model: StatefulLM, source: TrainingData, rows: Sequence[int], state: FastWeightState, device: torch.device
) -> FastWeightState:
    """The state after sections in their order."""
    for row in rows:
        state = drop_cache(
            score_tokens(model, cast(DocumentBatch, source.batch([row], 0, 0)).to(device), state, True).state
        )
    return state


def evaluate_book(
    model: StatefulLM,
    source: TrainingData,
    text: Sequence[int],
    other: Sequence[int] | None,
    device: torch.device,
    bytes_per_token: Tensor | None = None,
) -> list[StreamRecord]:
    """The held-out sections of a book: from a fresh state, after its other sections, and after as many of another."""
    read, held = split_sections(text, text_name(source, text[0]))
    fresh = model.initial_state(1)
    after = read_sections(model, source, read, fresh, device)
    states, found = {FRESH: fresh, AFTER_READING: after}, list[StreamRecord]()
    if other is not None:
        between, _ = split_sections(other, text_name(source, other[0]))
        states[AFTER_OTHER_BOOK] = read_sections(model, source, between[: len(read)], after, device)
    for row in held:
        section = cast(DocumentBatch, source.batch([row], 0, 0)).to(device)
        ways = {way: score_section(model, section, state, bytes_per_token) for way, state in states.items()}
        found.append(StreamRecord(section.document_ids[0], ways))
    return found


def score_section(
    model: StatefulLM, section: DocumentBatch, state: FastWeightState, bytes_per_token: Tensor | None
) -> StreamItemResult:
    """A section on a fork; it teaches nothing where attention sees it. Updates and bytes are of the state before."""
    got = score_tokens(model, section, state, True, freeze_last_segment=len(section.segment_slices) == 1)
    (cells,) = score_passage(section, got.nll, torch.zeros_like(state.position), bytes_per_token)
    return StreamItemResult(
        {name: x for name, x in cells.items() if not name[0].isdigit()},
        count_level_updates(state)[0],
        values.num_bytes(state),
    )


@torch.no_grad()
def evaluate_books(
    model: StatefulLM,
    source: TrainingData,
    device: torch.device,
    *,
    bytes_per_token: Tensor | None = None,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    extra_files: Mapping[str, str] | None = None,
    progress: ProgressCallback | None = None,
) -> list[StreamRecord]:
    """Every held-out section of every book of a source, the next book in between, if there is one.

    Kept as `evaluation.kept` says, a line a book. Raises `BadInput` (66) for a text of fewer than five sections.
    """
    all_ = group_rows_by_text(source)
    for text in all_:
        split_sections(text, text_name(source, text[0]))
    mark = to_canonical_json({**(key or {}), "data": source.fingerprint, "stream": "books"})

    def made(places: range) -> list[str]:
        others = [all_[(i + 1) % len(all_)] if len(all_) > 1 else None for i in places]
        each = (
            evaluate_book(model, source, all_[i], other, device, bytes_per_token)
            for i, other in zip(places, others, strict=True)
        )
        return ["\t".join(row.to_json_line().strip() for row in rows) + "\n" for rows in each]

    lines = results_store.run_resumable(
        folder, mark, len(all_), made, batch_size=1, extra_files=extra_files, progress=progress
    )
    return [row for line in lines for row in parse_book_line(line)]


def parse_book_line(line: str) -> list[StreamRecord]:
    """The sections of a book's line."""
    return [parse_stream_record(each) for each in line.split("\t")]


@torch.no_grad()
def evaluate_levels(
    models: Mapping[str, StatefulLM],
    source: TrainingData,
    device: torch.device,
    *,
    bytes_per_token: Tensor | None = None,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    extra_files: Mapping[str, str] | None = None,
    progress: ProgressCallback | None = None,
) -> list[StreamRecord]:
    """Books read in order by a model and by variants of it, by name: with a level that stands still, say.

    The first model is read with nothing learned too. Kept as `evaluation.kept` says.
    """
    all_, name = group_rows_by_text(source), next(iter(models))
    ways = [(each, model, StreamCondition(each, True, True)) for each, model in models.items()]
    ways.append((f"{name}, still", models[name], StreamCondition(f"{name}, still", False, True)))
    mark = to_canonical_json(
        {**(key or {}), "data": source.fingerprint, "stream": "levels", "ways": [w[0] for w in ways]}
    )

    def made(places: range) -> list[str]:
        some = [all_[i] for i in places]
        each = [evaluate_passages(model, source, [way], some, device, None, bytes_per_token) for _, model, way in ways]
        joined = [StreamRecord(rows[0].id, {way: said for row in rows for way, said in row.ways.items()})
                  for rows in zip(*each, strict=True)]  # fmt: skip
        return [row.to_json_line() for row in joined]

    found = results_store.run_resumable(
        folder, mark, len(all_), made, batch_size=1, extra_files=extra_files, progress=progress
    )
    return [parse_stream_record(line) for line in found]


def compute_paired_gains(records: Sequence[Sequence[StreamRecord]], baseline: str) -> list[PairedGain]:
    """What each other way saves against one, paired by item; of several seeds an item's mean over them.

    A standard error over few items, sections of a few books, is of those books.
    """

    def nats(row: StreamRecord, way: str) -> float:
        total, n = row.conditions[way].sums[OVERALL]
        return total / n

    found: list[PairedGain] = []
    for way in (way for way in records[0][0].conditions if way != baseline):
        saved = np.mean([[nats(row, baseline) - nats(row, way) for row in rows] for rows in records], axis=0)
        se = float(np.std(saved, ddof=1) / math.sqrt(len(saved))) if len(saved) > 1 else math.nan
        found.append(PairedGain(way, baseline, float(np.mean(saved)), se, len(saved)))
    return found


def retained_share(gains: Sequence[PairedGain]) -> float | None:
    """The share of what reading a book has saved that is there after another one."""
    saved = {gain.condition: gain.nats_saved for gain in gains}
    return (
        saved[AFTER_OTHER_BOOK] / saved[AFTER_READING]
        if AFTER_READING in saved and AFTER_OTHER_BOOK in saved and saved[AFTER_READING] > 0
        else None
    )
