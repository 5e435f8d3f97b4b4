"""Texts read stretch by stretch, the state carried from one to the next or begun anew; nats by how much was read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from laconic.batches import DocumentBatch
from laconic.errors import InputError
from laconic.evaluation.streams.evaluate import (
    StreamCondition,
    StreamItemResult,
    StreamRecord,
    count_level_updates,
    fork_state,
    score_tokens,
)
from laconic.evaluation.streams.metrics import MetricSums, merge_sums, score_passage
from laconic.interfaces import StatefulLM, TrainingData
from laconic.nested import state as values
from laconic.nested.state import FastWeightState

NAME_BATCH = 64  # stretches whose names are looked at


def group_rows_by_text(source: TrainingData) -> list[list[int]]:
    """The rows of each text in their order, by names TEXT@PLACE. Raises `BadInput` (66) where one is missing."""
    texts: dict[str, list[tuple[int, int, int]]] = {}
    for a in range(0, len(source), NAME_BATCH):
        places = range(a, min(a + NAME_BATCH, len(source)))
        found = cast(DocumentBatch, source.batch(places, 0, 0))
        for row, name, length in zip(places, found.document_ids, found.attention_mask.sum(1).tolist(), strict=True):
            text, _, at = name.rpartition("@")
            texts.setdefault(text, []).append((int(at), length, row))
    for text, parts in texts.items():
        parts.sort()
        ends = [at + length for at, length, _ in parts]
        if parts[0][0] or any(end != at for end, (at, _, _) in zip(ends, parts[1:], strict=False)):
            raise InputError(f"{text}: its stretches do not follow one another from the start; ask for all rows of it")
    return [[row for _, _, row in parts] for parts in texts.values()]


def evaluate_passages(
    model: StatefulLM,
    source: TrainingData,
    conditions: Sequence[StreamCondition],
    texts: Sequence[Sequence[int]],
    device: torch.device,
    prefix_state: FastWeightState | None = None,
    bytes_per_token: Tensor | None = None,
) -> list[StreamRecord]:
    """Texts, given by their rows, each in every way."""
    names = [cast(DocumentBatch, source.batch(rows[:1], 0, 0)).document_ids[0].rpartition("@")[0] for rows in texts]
    said = {
        way.name: read_texts(model, source, way, texts, device, prefix_state, bytes_per_token) for way in conditions
    }
    return [StreamRecord(name, {way: each[b] for way, each in said.items()}) for b, name in enumerate(names)]


def read_texts(
    model: StatefulLM,
    source: TrainingData,
    condition: StreamCondition,
    texts: Sequence[Sequence[int]],
    device: torch.device,
    prefix_state: FastWeightState | None,
    bytes_per_token: Tensor | None,
) -> list[StreamItemResult]:
    """Texts side by side in one way; those that have ended drop out."""
    cells: list[list[MetricSums]] = [[] for _ in texts]
    fired: list[list[tuple[float, ...]]] = [[] for _ in texts]
    held, state, size = list(range(len(texts))), fork_state(model, prefix_state, len(texts)), 0
    for n in range(max(map(len, texts))):
        going = [b for b in held if n < len(texts[b])]
        found = cast(DocumentBatch, source.batch([texts[b][n] for b in going], 0, 0)).to(device)
        if condition.carry_state:
            state = values.select_rows(state, [held.index(b) for b in going])
        else:
            state = fork_state(model, prefix_state, len(going))
        first = state.position - (0 if prefix_state is None else prefix_state.position)
        got = score_tokens(model, found, state, condition.update_weights)
        held, state, size = going, drop_cache(got.state), values.num_bytes(got.state) // len(going)
        new = score_passage(found, got.nll, first, bytes_per_token)
        for b, one, moved in zip(going, new, count_level_updates(state), strict=True):
            cells[b].append(one)
            fired[b] = [moved] if condition.carry_state else [*fired[b], moved]
    totals = [tuple(sum(level) for level in zip(*each, strict=True)) for each in fired]
    return [StreamItemResult(merge_sums(one), total, size) for one, total in zip(cells, totals, strict=True)]


def drop_cache(state: FastWeightState) -> FastWeightState:
    """The same fast weights where attention has read nothing yet: it sees one stretch at a time, as in training."""
    layers = (layer if layer.cache is None else replace(layer, cache=layer.cache.crop(0)) for layer in state.layers)
    return replace(state, layers=tuple(layers))
