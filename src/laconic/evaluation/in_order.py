"""Texts read stretch by stretch, the state carried from one to the next or begun anew; nats by how much was read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from laconic.core import state as values
from laconic.core.contract import Documents, Learner, Source
from laconic.core.errors import BadInput
from laconic.core.state import State
from laconic.evaluation.cells import Cells, joined, passage
from laconic.evaluation.listening import Row, Said, Way, begun, heard, updates

AT_ONCE = 64  # stretches whose names are looked at


def grouped(source: Source) -> list[list[int]]:
    """The rows of each text in their order, by names TEXT@PLACE. Raises `BadInput` (66) where one is missing."""
    texts: dict[str, list[tuple[int, int, int]]] = {}
    for a in range(0, len(source), AT_ONCE):
        places = range(a, min(a + AT_ONCE, len(source)))
        found = cast(Documents, source.batch(places, 0, 0))
        for row, name, length in zip(places, found.names, found.live.sum(1).tolist(), strict=True):
            text, _, at = name.rpartition("@")
            texts.setdefault(text, []).append((int(at), length, row))
    for text, parts in texts.items():
        parts.sort()
        ends = [at + length for at, length, _ in parts]
        if parts[0][0] or any(end != at for end, (at, _, _) in zip(ends, parts[1:], strict=False)):
            raise BadInput(f"{text}: its stretches do not follow one another from the start; ask for all rows of it")
    return [[row for _, _, row in parts] for parts in texts.values()]


def passages(
    model: Learner,
    source: Source,
    ways: Sequence[Way],
    texts: Sequence[Sequence[int]],
    device: torch.device,
    before: State | None = None,
    bytes_of: Tensor | None = None,
) -> list[Row]:
    """Texts, given by their rows, each in every way."""
    names = [cast(Documents, source.batch(rows[:1], 0, 0)).names[0].rpartition("@")[0] for rows in texts]
    said = {way.name: read(model, source, way, texts, device, before, bytes_of) for way in ways}
    return [Row(name, {way: each[b] for way, each in said.items()}) for b, name in enumerate(names)]


def read(
    model: Learner,
    source: Source,
    way: Way,
    texts: Sequence[Sequence[int]],
    device: torch.device,
    before: State | None,
    bytes_of: Tensor | None,
) -> list[Said]:
    """Texts side by side in one way; those that have ended drop out."""
    cells: list[list[Cells]] = [[] for _ in texts]
    fired: list[list[tuple[float, ...]]] = [[] for _ in texts]
    held, state, size = list(range(len(texts))), begun(model, before, len(texts)), 0
    for n in range(max(map(len, texts))):
        going = [b for b in held if n < len(texts[b])]
        found = cast(Documents, source.batch([texts[b][n] for b in going], 0, 0)).to(device)
        if way.carry:
            state = values.take(state, [held.index(b) for b in going])
        else:
            state = begun(model, before, len(going))
        first = state.position - (0 if before is None else before.position)
        got = heard(model, found, state, way.learn)
        held, state, size = going, let_go(got.state), values.bytes(got.state) // len(going)
        new = passage(found, got.nats, first, bytes_of)
        for b, one, moved in zip(going, new, updates(state), strict=True):
            cells[b].append(one)
            fired[b] = [moved] if way.carry else [*fired[b], moved]
    totals = [tuple(sum(level) for level in zip(*each, strict=True)) for each in fired]
    return [Said(joined(one), total, size) for one, total in zip(cells, totals, strict=True)]


def let_go(state: State) -> State:
    """The same fast weights where attention has read nothing yet: it sees one stretch at a time, as in training."""
    layers = (layer if layer.cache is None else replace(layer, cache=layer.cache.crop(0)) for layer in state.layers)
    return replace(state, layers=tuple(layers))
