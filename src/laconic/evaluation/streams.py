"""Streams a model that learns while it reads is measured on: recall, copies, strings, needles, text; learning or not.

An item is read on a fork of the state before it, and changes nothing.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from laconic.core import state as values
from laconic.core.artifact import canonical
from laconic.core.contract import Documents, Learner, Source
from laconic.core.state import State
from laconic.evaluation import kept
from laconic.evaluation.cells import copying, languages, mqar, needle
from laconic.evaluation.in_order import grouped, passages
from laconic.evaluation.listening import Cached, Row, Said, Way, begun, heard, row_of, updates

Stream = Literal["mqar", "copying", "languages", "needle", "ppl"]
JUDGED = {"mqar": mqar, "copying": copying, "languages": languages, "needle": needle}


def ways_of(model: Learner, name: Stream) -> tuple[Way, ...]:
    """Learning on and off, and for text carried and reset; a cache cannot be turned off, and begins anew."""
    if isinstance(model, Cached):
        return (Way("plain", learn=False),)
    each = (("learn", True), ("still", False))
    if name != "ppl":
        return tuple(Way(*one) for one in each)
    ends = (("carry", True), ("reset", False))
    return tuple(Way(f"{way}, {end}", learn, carry) for way, learn in each for end, carry in ends)


def items(model: Learner, name: Stream, found: Documents, before: State | None) -> list[Row]:
    """Documents that stand alone, each in every way."""
    said: dict[str, list[Said]] = {}
    for way in ways_of(model, name):
        got = heard(model, found, begun(model, before, found.B), way.learn, answer=name == "needle")
        cells, size = JUDGED[name](found, got.nats, got.right), values.bytes(got.state) // found.B
        said[way.name] = [Said(*each, size) for each in zip(cells, updates(got.state), strict=True)]
    return [Row(id, {way: each[b] for way, each in said.items()}) for b, id in enumerate(found.names)]


@torch.no_grad()
def measure(
    model: Learner,
    name: Stream,
    source: Source,
    device: torch.device,
    *,
    batch: int,
    before: State | None = None,
    bytes_of: Tensor | None = None,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    show: Callable[[str, int, int], None] | None = None,
) -> list[Row]:
    """Every item of a source in every way, `batch` at once; those of ppl are whole texts, read stretch by stretch.

    `before` is the state of one row that each item begins on. `bytes_of` are the bytes of each id, for nats a byte.
    With a `folder` rows are kept as `evaluation.kept` says; `key` is what they are of beside the data. Raises `Busy`
    (73) for a folder of another key, `BadInput` (66) for stretches that do not follow one another.
    """
    ways = ways_of(model, name)
    books = grouped(source) if name == "ppl" else [[i] for i in range(len(source))]
    said = {"data": source.fingerprint, "items": str(len(books)), "stream": name}
    said |= {"ways": "; ".join(way.name for way in ways)}

    def made(places: range) -> list[str]:
        if name == "ppl":
            rows = passages(model, source, ways, [books[i] for i in places], device, before, bytes_of)
        else:
            rows = items(model, name, cast(Documents, source.batch(places, 0, 0)).to(device), before)
        return [row.line() for row in rows]

    mark = canonical({**(key or {}), **said})
    return [row_of(line) for line in kept.lines(folder, mark, len(books), made, batch=batch, texts=texts, show=show)]
