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

from laconic.core import state as values
from laconic.core.artifact import canonical
from laconic.core.contract import Documents, Learner, Source
from laconic.core.errors import BadInput
from laconic.core.state import State
from laconic.evaluation import kept
from laconic.evaluation.cells import ALL, passage
from laconic.evaluation.in_order import grouped, let_go, passages
from laconic.evaluation.listening import Row, Said, Way, heard, row_of, updates

EVERY = 5  # of so many sections one is held out
FRESH, AFTER, ANOTHER = "fresh", "after", "after another"
Show = Callable[[str, int, int], None]


class Gain(NamedTuple):
    """Nats a token that a way saves against another, the mean over items, paired, and its standard error."""

    way: str
    against: str
    saved: float
    se: float
    items: int


def parted(text: Sequence[int], name: str) -> tuple[list[int], list[int]]:
    """The sections that are read, and those held out. Raises `BadInput` (66) for fewer than five."""
    held = [*text[EVERY - 1 :: EVERY]]
    if not held:
        raise BadInput(
            f"{name}: {len(text)} sections, of which every fifth is held out; give longer texts or more rows"
        )
    return [row for row in text if row not in held], held


def named(source: Source, row: int) -> str:
    """The text that a section is of."""
    return cast(Documents, source.batch([row], 0, 0)).names[0].rpartition("@")[0]


def studied(model: Learner, source: Source, rows: Sequence[int], state: State, device: torch.device) -> State:
    """The state after sections in their order."""
    for row in rows:
        state = let_go(heard(model, cast(Documents, source.batch([row], 0, 0)).to(device), state, True).state)
    return state


def book(
    model: Learner,
    source: Source,
    text: Sequence[int],
    other: Sequence[int] | None,
    device: torch.device,
    bytes_of: Tensor | None = None,
) -> list[Row]:
    """The held-out sections of a book: from a fresh state, after its other sections, and after as many of another."""
    read, held = parted(text, named(source, text[0]))
    fresh = model.start(1)
    after = studied(model, source, read, fresh, device)
    states, found = {FRESH: fresh, AFTER: after}, list[Row]()
    if other is not None:
        between, _ = parted(other, named(source, other[0]))
        states[ANOTHER] = studied(model, source, between[: len(read)], after, device)
    for row in held:
        section = cast(Documents, source.batch([row], 0, 0)).to(device)
        ways = {way: scored(model, section, state, bytes_of) for way, state in states.items()}
        found.append(Row(section.names[0], ways))
    return found


def scored(model: Learner, section: Documents, state: State, bytes_of: Tensor | None) -> Said:
    """A section on a fork; it teaches nothing where attention sees it. Updates and bytes are of the state before."""
    got = heard(model, section, state, True, answer=len(section.segments) == 1)
    (cells,) = passage(section, got.nats, torch.zeros_like(state.position), bytes_of)
    return Said({name: x for name, x in cells.items() if not name[0].isdigit()}, updates(state)[0], values.bytes(state))


@torch.no_grad()
def books(
    model: Learner,
    source: Source,
    device: torch.device,
    *,
    bytes_of: Tensor | None = None,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    show: Show | None = None,
) -> list[Row]:
    """Every held-out section of every book of a source, the next book in between, if there is one.

    Kept as `evaluation.kept` says, a line a book. Raises `BadInput` (66) for a text of fewer than five sections.
    """
    all_ = grouped(source)
    for text in all_:
        parted(text, named(source, text[0]))
    mark = canonical({**(key or {}), "data": source.fingerprint, "stream": "books"})

    def made(places: range) -> list[str]:
        others = [all_[(i + 1) % len(all_)] if len(all_) > 1 else None for i in places]
        each = (book(model, source, all_[i], other, device, bytes_of) for i, other in zip(places, others, strict=True))
        return ["\t".join(row.line().strip() for row in rows) + "\n" for rows in each]

    lines = kept.lines(folder, mark, len(all_), made, batch=1, texts=texts, show=show)
    return [row for line in lines for row in rows_of(line)]


def rows_of(line: str) -> list[Row]:
    """The sections of a book's line."""
    return [row_of(each) for each in line.split("\t")]


@torch.no_grad()
def levels(
    models: Mapping[str, Learner],
    source: Source,
    device: torch.device,
    *,
    bytes_of: Tensor | None = None,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    show: Show | None = None,
) -> list[Row]:
    """Books read in order by a model and by variants of it, by name: with a level that stands still, say.

    The first model is read with nothing learned too. Kept as `evaluation.kept` says.
    """
    all_, name = grouped(source), next(iter(models))
    ways = [(each, model, Way(each, True, True)) for each, model in models.items()]
    ways.append((f"{name}, still", models[name], Way(f"{name}, still", False, True)))
    mark = canonical({**(key or {}), "data": source.fingerprint, "stream": "levels", "ways": [w[0] for w in ways]})

    def made(places: range) -> list[str]:
        some = [all_[i] for i in places]
        each = [passages(model, source, [way], some, device, None, bytes_of) for _, model, way in ways]
        joined = [Row(rows[0].id, {way: said for row in rows for way, said in row.ways.items()})
                  for rows in zip(*each, strict=True)]  # fmt: skip
        return [row.line() for row in joined]

    found = kept.lines(folder, mark, len(all_), made, batch=1, texts=texts, show=show)
    return [row_of(line) for line in found]


def gains(seeds: Sequence[Sequence[Row]], against: str) -> list[Gain]:
    """What each other way saves against one, paired by item; of several seeds an item's mean over them.

    A standard error over few items, sections of a few books, is of those books.
    """

    def nats(row: Row, way: str) -> float:
        total, n = row.ways[way].cells[ALL]
        return total / n

    found: list[Gain] = []
    for way in (way for way in seeds[0][0].ways if way != against):
        saved = np.mean([[nats(row, against) - nats(row, way) for row in rows] for rows in seeds], axis=0)
        se = float(np.std(saved, ddof=1) / math.sqrt(len(saved))) if len(saved) > 1 else math.nan
        found.append(Gain(way, against, float(np.mean(saved)), se, len(saved)))
    return found


def left(found: Sequence[Gain]) -> float | None:
    """The share of what reading a book has saved that is there after another one."""
    saved = {gain.way: gain.saved for gain in found}
    return saved[ANOTHER] / saved[AFTER] if AFTER in saved and ANOTHER in saved and saved[AFTER] > 0 else None
