"""Tails scored after contexts that come to them as nothing, as vectors, as text, or as the end of that text.

Symbols: B documents, C columns of context, T of a tail, n segments of a context, D width. Nats are natural logarithms.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.core.artifact import canonical
from laconic.core.contract import Documents, Source
from laconic.core.errors import BadInput
from laconic.core.memory import Memory
from laconic.evaluation import kept

WIDTH = 32  # positions of a tail whose nats are kept as one number
ROOM = 1 << 22  # logits computed at once
WHOLE = 1 << 40  # tokens of an end that is all of a context
Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Split:
    """Documents parted into a context and the tail that is scored after it.

    `cuts` are the exclusive ends of the context's segments, the last is C. The first token of a tail is never scored,
    so that every scored token is predicted from inside the tail. `facts` as in `Documents`.
    """

    context: Int[Tensor, "B C"]
    cuts: tuple[int, ...]
    tail: Int[Tensor, "B T"]
    scored: Bool[Tensor, "B T"]
    index: Int[Tensor, " B"]
    names: tuple[str, ...]
    facts: Int[Tensor, " B"] | None = None

    @property
    def segments(self) -> tuple[slice, ...]:
        """Columns of each segment of the context."""
        return tuple(slice(a, b) for a, b in zip((0, *self.cuts), self.cuts, strict=False))

    def to(self, device: torch.device) -> "Split":
        """The same elsewhere."""
        facts = None if self.facts is None else self.facts.to(device)
        moved = (x.to(device) for x in (self.context, self.tail, self.scored, self.index))
        context, tail, scored, index = moved
        return replace(self, context=context, tail=tail, scored=scored, index=index, facts=facts)


def parted(found: Any) -> Split:
    """Documents whose last segment is the tail. Raises `BadInput` (66) where not all of them is text."""
    assert isinstance(found, Documents)
    *cuts, _ = found.cuts
    if not cuts or not bool(found.live.all()):
        raise BadInput(
            f"{found.names[0]}: {len(found.cuts)} segments, some of them cut short; give whole ones, two at least"
        )
    C = cuts[-1]
    scored = found.scored[:, C:].clone()
    scored[:, 0] = False
    return Split(found.text[:, :C], tuple(cuts), found.text[:, C:], scored, found.index, found.names, found.facts)


class Compressed(NamedTuple):
    """A context as vectors; how many each segment became, and where lengths are learned E[N] of each."""

    memory: Memory
    written: Int[Tensor, "B n"]
    expected: Float[Tensor, "B n"] | None


class Reader(Protocol):
    """What reads texts, behind a memory or alone."""

    def states(
        self, text: Int[Tensor, "B T"], live: Bool[Tensor, "B T"], memory: Memory | None
    ) -> Float[Tensor, "B T D"]: ...
    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]: ...


@dataclass(frozen=True)
class Way:
    """How a context comes to a tail: as the vectors that `compress` makes of it, else as the end of its text.

    `end` is how many tokens that has (`WHOLE`: all of them), or the name of an earlier way that had as many vectors.
    """

    name: str
    reader: Reader
    compress: Callable[[Split], Compressed] | None = None
    end: int | str = 0


class Said(NamedTuple):
    """One document in one way: nats of each `WIDTH` positions of the tail, and how many scored tokens came out right.

    `written` are vectors of each segment, `expected` E[N] of each where it is known; `held` vectors, or tokens of
    context, stood before the tail.
    """

    nats: tuple[float, ...]
    right: int
    held: int
    written: tuple[int, ...] = ()
    expected: tuple[float, ...] = ()


class Row(NamedTuple):
    """One document in every way; `scored` are the scored tokens of each `WIDTH` positions."""

    id: str
    facts: int | None
    scored: tuple[int, ...]
    ways: Mapping[str, Said]

    def line(self) -> str:
        """The row as one line of JSON."""
        ways = [{"way": name, **said._asdict()} for name, said in self.ways.items()]
        return canonical(self._asdict() | {"ways": ways}) + "\n"


def row_of(line: str) -> Row:
    """The row that `line` wrote."""
    found, ways = json.loads(line), dict[str, Said]()
    for x in found["ways"]:
        ways[x["way"]] = Said(tuple(x["nats"]), x["right"], x["held"], tuple(x["written"]), tuple(x["expected"]))
    return Row(found["id"], found["facts"], tuple(found["scored"]), ways)


class Measured(NamedTuple):
    """A way on a batch: nats and right answers per position of the tail, and what stood before it."""

    nats: Float[Tensor, "B T"]
    right: Bool[Tensor, "B T"]
    held: Int[Tensor, " B"]
    written: Int[Tensor, "B n"] | None = None
    expected: Float[Tensor, "B n"] | None = None


@torch.inference_mode()
def rows_of(split: Split, ways: Sequence[Way]) -> list[Row]:
    """Every document of a batch in every way."""
    found: dict[str, Measured] = {}
    for way in ways:
        found[way.name] = measured(split, way, found)
    counts = by_width(split.scored.long()).tolist()
    said = {name: told(each) for name, each in found.items()}
    facts = [None] * len(counts) if split.facts is None else split.facts.tolist()
    return [
        Row(split.names[b], facts[b], tuple(counts[b]), {name: each[b] for name, each in said.items()})
        for b in range(len(counts))
    ]


def measured(split: Split, way: Way, before: Mapping[str, Measured]) -> Measured:
    """One way; an end may be as long as the vectors of a way `before` it."""
    B, C = split.context.shape
    if way.compress is not None:
        made = way.compress(split)
        hidden = way.reader.states(split.tail, torch.ones_like(split.tail, dtype=torch.bool), made.memory)
        return Measured(*scores(way.reader, hidden, split), made.memory.lengths, made.written, made.expected)
    asked = before[way.end].held if isinstance(way.end, str) else split.index.new_full((B,), way.end)
    held = asked.clamp(max=C)
    text, live = ended(split, held)
    hidden = way.reader.states(text, live, None)[:, text.shape[1] - split.tail.shape[1] :]
    return Measured(*scores(way.reader, hidden, split), held)


def ended(split: Split, counts: Int[Tensor, " B"]) -> tuple[Int[Tensor, "B P"], Bool[Tensor, "B P"]]:
    """The last `counts` tokens of each context, then the tail."""
    m, C = int(counts.max()), split.context.shape[1]
    at = torch.arange(m, device=counts.device) >= m - counts[:, None]
    text = torch.cat([split.context[:, C - m :], split.tail], 1)
    return text, torch.cat([at, torch.ones_like(split.tail, dtype=torch.bool)], 1)


def scores(
    reader: Reader, hidden: Float[Tensor, "B T D"], split: Split
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Nats of each scored token of the tails, each predicted from the one before it, and whether it was the likeliest.

    What is not scored has 0 and False.
    """
    at = split.scored[:, 1:]
    states, targets = hidden[:, :-1][at], split.tail[:, 1:][at]
    nats, right = states.new_zeros(len(targets), dtype=torch.float32), torch.zeros_like(targets, dtype=torch.bool)
    step = max(ROOM // reader.logits(states[:1]).shape[-1], 1)
    for i in range(0, len(targets), step):
        rows, asked = reader.logits(states[i : i + step]).float(), targets[i : i + step]
        nats[i : i + step] = F.cross_entropy(rows, asked, reduction="none")
        right[i : i + step] = rows.argmax(-1) == asked
    wide, hit = hidden.new_zeros(split.tail.shape, dtype=torch.float32), torch.zeros_like(split.scored)
    wide[:, 1:][at], hit[:, 1:][at] = nats, right
    return wide, hit


def by_width(x: Tensor) -> Tensor:
    """Sums over each `WIDTH` positions, [B, T] to [B, ceil(T / WIDTH)]."""
    return F.pad(x, (0, -x.shape[1] % WIDTH)).unflatten(1, (-1, WIDTH)).sum(-1)


def told(found: Measured) -> list[Said]:
    """A way on a batch as numbers, document by document."""
    nats, right, held = by_width(found.nats.double()).tolist(), found.right.sum(1).tolist(), found.held.tolist()
    none: list[list[Any]] = [[]] * len(held)
    written = none if found.written is None else found.written.tolist()
    expected = none if found.expected is None else found.expected.double().tolist()
    each = zip(nats, right, held, written, expected, strict=True)
    return [Said(tuple(a), b, c, tuple(d), tuple(e)) for a, b, c, d, e in each]


def evaluate(
    source: Source,
    ways: Sequence[Way],
    device: torch.device,
    *,
    batch: int,
    folder: Path | None = None,
    key: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
    result: Callable[[Sequence[Row]], Mapping[str, Any]] | None = None,
    show: Show | None = None,
) -> list[Row]:
    """Every document of a set in every way, `batch` at once.

    With a `folder`, rows are kept as `evaluation.kept` says: a folder that is there is read, one that was begun is gone
    on with. `result` are the figures that lie beside them. Raises `Busy` (73) for a folder of another key.
    """
    mark = canonical({**(key or {}), "data": source.fingerprint, "ways": ",".join(way.name for way in ways)})

    def made(places: range) -> list[str]:
        return [row.line() for row in rows_of(parted(source.batch(places, 0, 0)).to(device), ways)]

    def figures(lines: Sequence[str]) -> Mapping[str, Any]:
        return result([row_of(line) for line in lines]) if result else {}

    found = kept.lines(folder, mark, len(source), made, batch=batch, result=figures, texts=texts, show=show)
    return [row_of(line) for line in found]
