"""A run as evaluation reads it: what compresses its contexts, in how many ways, and which documents are held out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.core.artifact import canonical
from laconic.core.contract import Documents, Source
from laconic.core.errors import BadInput
from laconic.core.memory import Memory
from laconic.data.excerpts import SPAN, Tails, tails
from laconic.data.passages import Passages
from laconic.data.settings import Part
from laconic.evaluation.scored import WHOLE, Compressed, Split, Way
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.estimators import ratio_label
from laconic.methods.halting import draws
from laconic.methods.plain import Plain
from laconic.methods.stopping import Stopping, default
from laconic.recipe import models, rows
from laconic.recipe.methods import method_of
from laconic.recipe.opened import Opened, start

EXCERPT = "excerpt"
SEGMENTS = (1, 4, 8, 12)  # quarters of a segment: how much text stands before a tail
MOST = 8  # fixed lengths that one run is read with
QUANTILES = (0.1, 0.25, 0.75, 0.9)
BATCH = 16_384  # tokens of contexts and tails read at once
STRETCHES = 200  # of a set of documents, where nobody says how many


@dataclass(frozen=True)
class Compressor:
    """A method that compresses, as evaluation asks it; `seed` is of lengths that are drawn."""

    method: AutoCompressor
    seed: int

    def compress(self, split: Split, how: Stopping | None) -> Compressed:
        """The segments of a context one after another; what is soft is read as its gate was in training."""
        told, memory = default(self.method.unit) if how is None else how, None
        written, expected = list[Tensor](), list[Tensor]()
        for i, columns in enumerate(split.segments):
            if told.stop == "sample":
                drawn = draws("length", self.seed, 0, split.index.cpu(), i, self.method.reading.fixed)
                told = told._replace(draws=drawn.to(split.index.device))
            memory = self.method.compress(split.context[:, columns], None, memory, told)
            written.append(memory.block_lengths[:, -1])
            if memory.log_s is not None:
                new = memory.block == memory.blocks - 1
                expected.append((memory.log_s.exp() * new).sum(1))
        assert memory is not None
        return Compressed(memory, torch.stack(written, 1), torch.stack(expected, 1) if expected else None)

    def oracle(self, split: Split) -> Compressed:
        """Eq. VL24: of each segment the length with the least nats of what follows it, and price, found by trial.

        What follows is the next segment, and behind the last one the tail itself: a bound, not a method. What a vector
        is worth further on is not seen. It takes as many compressions and readings of a segment as there are lengths,
        `MOST` at most. The price is the run's; 0 where it has none.
        """
        method, lengths = self.method, spread(self.method.reading.lengths)
        price = 0.0 if method.halting is None else float(method.summaries.steered[0])
        memory, written, segments = None, list[Tensor](), split.segments
        for columns, after in zip(segments, (*segments[1:], None), strict=True):
            text = split.context[:, columns]
            tried = [method.compress(text, None, memory, Stopping("fixed", n=n)) for n in lengths]
            following = split.tail if after is None else split.context[:, after]
            live = torch.ones_like(following, dtype=torch.bool)
            scored = split.scored if after is None else live
            nats = torch.stack([method.nats(following, live, scored, each) for each in tried], 1)
            best = ratio_label(nats, tuple(lengths), price)
            memory = Memory.stack(*tried).take(best * len(text) + torch.arange(len(text), device=best.device)).pack()
            written.append(memory.block_lengths[:, -1])
        assert memory is not None
        return Compressed(memory, torch.stack(written, 1), None)

    def told(self, how: Stopping | None = None) -> Callable[[Split], Compressed]:
        """`compress` with its lengths said; None: as the run has them."""
        return partial(self.compress, how=how)

    def states(
        self, text: Int[Tensor, "B T"], live: Bool[Tensor, "B T"], memory: Memory | None
    ) -> Float[Tensor, "B T D"]:
        """A text behind a memory, or alone; a text alone needs no room for summaries."""
        unit = self.method.unit
        return unit.read(unit.empty(len(text)) if memory is None else memory, text, live)

    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Of words alone, whatever control rows there are."""
        return self.method.decoder.logits(hidden)


@dataclass(frozen=True)
class PlainReader:
    """A plain language model: the control, which reads text."""

    method: Plain

    def states(
        self, text: Int[Tensor, "B T"], live: Bool[Tensor, "B T"], memory: Memory | None
    ) -> Float[Tensor, "B T D"]:
        """A text alone."""
        return self.method.decoder(self.method.decoder.embed(text), live=live).hidden

    def logits(self, hidden: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Of words."""
        return self.method.decoder.logits(hidden)


def starting(run: Opened) -> AutoCompressor:
    """The method as its run began, before a step."""
    recipe, device = run.recipe, run.parts.decoder.words.weight.device
    decoder, tokenizer = start(recipe, device)
    method = method_of(models.fresh(recipe, decoder, tokenizer, ""), recipe, 1).to(device).eval()
    assert isinstance(method, AutoCompressor)
    return method


def spread(lengths: Sequence[int]) -> list[int]:
    """All of some lengths, or `MOST` of them from the first to the last, about as many times longer each time."""
    if len(lengths) <= MOST:
        return [*lengths]
    ratio = (lengths[-1] / lengths[0]) ** (1 / (MOST - 1))
    wanted = [lengths[0] * ratio**i for i in range(MOST)]
    return sorted({min(lengths, key=lambda n: abs(n - each)) for each in wanted})


def ways(run: Opened, C: int, T: int, *, lengths: bool, begun: AutoCompressor | None = None) -> list[Way]:
    """The ways in which a run reads a tail of T tokens behind a context of C.

    With `lengths`, in every length and by every rule that it has learned; `begun` is the method before training.
    """
    method = run.method
    if isinstance(method, Plain):
        ends = [2**i for i in range(C.bit_length()) if 2**i < C] if lengths else []
        reader = PlainReader(method)
        return [Way("none", reader), *(Way(f"end {n}", reader, end=n) for n in ends), Way("full", reader, end=WHOLE)]
    assert isinstance(method, AutoCompressor)
    reader = Compressor(method, run.recipe.seed)
    found = [Way("none", reader), Way("compressed", reader, reader.told()), Way("truncated", reader, end="compressed")]
    if C + T + method.unit.lead <= method.decoder.config.max_position_embeddings:
        found.append(Way("full", reader, end=WHOLE))
    if begun is not None:
        first = Compressor(begun, run.recipe.seed)
        found += [Way("untrained none", first), Way("untrained", first, first.told())]
    if method.reading.length != "fixed":
        found.append(Way("oracle length", reader, reader.oracle))
    return found + (by_length(reader) if lengths else [])


def by_length(reader: Compressor) -> list[Way]:
    """The lengths that a method can be told, with ends of text as long, and the rules of one that stops."""
    reading, found = reader.method.reading, list[Way]()
    if reading.length == "fixed":
        return found
    for n in spread(reading.lengths):
        name = f"n = {n}"
        found += [Way(name, reader, reader.told(Stopping("fixed", n=n))), Way(f"end, {name}", reader, end=name)]
    if reading.length != "stop":
        return found
    for q in QUANTILES:
        found.append(Way(f"quantile {q:g}", reader, reader.told(Stopping("quantile", q=q))))
    found.append(Way("sampled", reader, reader.told(Stopping("sample"))))
    return [*found, Way("soft", reader, reader.told(Stopping("soft")))]


@dataclass(frozen=True)
class Tailed:
    """Tails of held-out documents behind `n` tokens each (contract.Source); with `span` copied from those tokens."""

    tails: Tails
    n: int
    segment: int
    span: int | None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all ids, and of how they are parted."""
        said = {"names": self.tails.names, "n": self.n, "segment": self.segment, "span": self.span}
        return sha256(canonical(said).encode() + self.tails.text.astype("<i4").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.tails.names)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Documents:
        """Some of them."""
        if self.span is None:
            return self.tails.continued(rows, self.n, self.segment)
        return self.tails.copied(rows, self.n, self.segment, self.span)


class Set(NamedTuple):
    """What is asked of a run under one name, in some ways, so many documents at once."""

    name: str
    source: Source
    ways: Sequence[Way]
    batch: int
    notes: tuple[str, ...] = ()


def sets(run: Opened, asked: str, count: int | None) -> list[Set]:
    """Documents that a run's recipe holds out: `asked` are test or valid (E1, E2), or excerpt (E1x, of test).

    Raises `BadInput` (66) where there are none.
    """
    recipe, context = run.recipe, run.parts.decoder.config.max_position_embeddings
    begun = starting(run) if isinstance(run.method, AutoCompressor) else None
    part: Part = "valid" if asked == "valid" else "test"
    if recipe.data.kind == "recall":
        if asked == EXCERPT:
            raise BadInput("excerpt: the recall task is no text to take one from; ask for test")
        source = rows.held_out(recipe, run.parts.tokenizer, context, part, count).source
        task = recipe.data.recall
        C, T = task.length * task.segments, 2 * task.queries
        return [Set(part, source, ways(run, C, T, lengths=True, begun=begun), max(BATCH // (C + T), 1))]
    found = rows.held_out(recipe, run.parts.tokenizer, context, part)
    assert isinstance(found.source, Passages)
    S, source = recipe.data.text.mean, found.source
    drawn = tails(source.names, source.ids, max(SEGMENTS) * S // 4, S, count or STRETCHES)
    made = of_text(run, drawn, S, SPAN if asked == EXCERPT else None, begun)
    name = f"{part}-{EXCERPT}" if asked == EXCERPT else part
    return [Set(f"{name}-{each.n}", each, own, max(BATCH // (each.n + S), 1), found.notes) for each, own in made]


def of_text(
    run: Opened, drawn: Tails, S: int, span: int | None, begun: AutoCompressor | None
) -> Iterator[tuple[Tailed, list[Way]]]:
    """Each length of context that the run has room for, and its ways: behind one segment all, behind others some."""
    most = run.method.most(S) if isinstance(run.method, AutoCompressor) else None
    for quarters in SEGMENTS:
        n = quarters * S // 4
        if n < (span or 1) or (most is not None and -(-n // S) >= most):
            continue
        yield Tailed(drawn, n, S, span), ways(run, n, span or S, lengths=n == S, begun=begun)
