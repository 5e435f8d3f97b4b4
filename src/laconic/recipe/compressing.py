"""Texts of any length compressed side by side, a segment of each at a time; what is done can be kept and gone on from.

Of a text only one segment is held, besides the tokenizer's window; of a memory all vectors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.core.artifact import open_artifact, save_artifact
from laconic.core.errors import BadInput, Busy, Usage
from laconic.core.memory import Memory
from laconic.core.provenance import Document
from laconic.data.streaming import pieces
from laconic.data.tokens import Tokenizer
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.halting import draws
from laconic.methods.stopping import Stop, Stopping, default

KIND = "compression"  # of the file in which a compression is kept before it is done
COUNTS = ("group", "segment", "tokens", "spent")


@dataclass(frozen=True)
class Lengths:
    """How many vectors a segment becomes: by a stop's rule, `n` of each, or a `budget` shared out over a whole text.

    `seed` is of the draws of stop sample, which depend on it, the text's number and the segment's alone.
    """

    stop: Stop
    q: float = 0.5
    tau: float = 0.5
    n: int | None = None
    budget: int | None = None
    seed: int = 0


def lengths(
    method: AutoCompressor,
    *,
    stop: Stop | None = None,
    q: float | None = None,
    tau: float | None = None,
    n: int | None = None,
    budget: int | None = None,
    seed: int = 0,
) -> Lengths:
    """What was asked, and where nothing was what the run's own settings say.

    Raises `Usage` (2) for two answers to one question; what a model has not learned is refused when it compresses.
    """
    asked = {"stop": stop, "n": n, "budget": budget, "q": q, "tau": tau}
    given = [name for name, value in asked.items() if value is not None]
    rules = {"quantile": ["q"], "threshold": ["tau"]}.get(str(stop), [])
    if len(given) > 1 and given != ["stop", *rules]:
        raise Usage(f"{' and '.join(given)} given; one of them says how many vectors a segment becomes")
    own = default(method.unit)
    if n is not None:
        return Lengths("fixed", n=n)
    if budget is not None:
        if budget < 1:
            raise Usage(f"budget {budget}: give 1 vector or more")
        return Lengths("soft", budget=budget)
    rule = stop or ("quantile" if q is not None else "threshold" if tau is not None else own.stop)
    return Lengths(rule, own.q if q is None else q, own.tau if tau is None else tau, own.n, seed=seed)


class Text:
    """A text read once, as its parts come: the ids of its segments, and at the end what is to be known of it."""

    def __init__(self, name: str, parts: Iterable[str], tokenizer: Tokenizer, segment: int) -> None:
        self.name, self.digest, self.tokenizer = name, sha256(), tokenizer
        self.segments: list[int] = []
        self.bytes = 0  # of the segments handed out, nearly: a character may be cut
        self.ids = pieces(self.heard(parts), tokenizer, segment)

    def heard(self, parts: Iterable[str]) -> Iterator[str]:
        """The parts, hashed on their way."""
        for part in parts:
            self.digest.update(part.encode())
            yield part

    def next(self) -> list[int]:
        """The ids of the next segment; none at the end. Raises `BadInput` (66) for a text without any."""
        found = next(self.ids, [])
        if found:
            self.segments.append(len(found))
            self.bytes += len(self.tokenizer.decode(found).encode())
        elif not self.segments:
            raise BadInput(f"{self.name}: empty; give a text to compress")
        return found

    @property
    def document(self) -> Document:
        """What was read of it."""
        return Document(self.name, self.digest.hexdigest(), sum(self.segments), tuple(self.segments))


class Grid(NamedTuple):
    """A segment of each text, padded on the right."""

    text: Int[Tensor, "B T"]
    live: Bool[Tensor, "B T"]


def grid(rows: Sequence[Sequence[int]], device: torch.device) -> Grid:
    """Rows of ids as one matrix, and where it is live."""
    T = max(map(len, rows))
    text = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=device)
    counts = torch.tensor([len(row) for row in rows], device=device)
    return Grid(text, torch.arange(T, device=device) < counts[:, None])


class Compression:
    """Texts on their way to vectors: `kept` are the rows that are done, `now` those of the group under way.

    `tokens` were read and `spent` positions went through the decoder. `digest` is of all ids, so that whoever goes on
    with what `save` wrote reads the same ones; `begun` is how far that was: groups from 0, segments of it from 1.
    """

    def __init__(self, method: AutoCompressor, how: Lengths) -> None:
        self.method, self.how = method, how
        self.device = method.decoder.words.weight.device
        self.kept: Memory | None = None
        self.now: Memory | None = None
        self.documents: list[tuple[Document, ...]] = []
        self.digest, self.group, self.segment, self.tokens, self.spent = sha256(), 0, 0, 0, 0
        self.begun, self.promised = (0, 0), ""

    def run(self, groups: Iterable[Sequence[Text]]) -> Iterator[Memory]:
        """The memory under way after each segment; when it ends, all rows are in `kept`.

        Raises `BadInput` (66) for a text without a token, and where the texts are not those of the file gone on from.
        """
        at = (0, 0)
        for self.group, group in enumerate(groups):
            self.segment = 0
            while any(ids := [text.next() for text in group]):
                self.segment += 1
                self.digest.update(repr(ids).encode())
                at = (self.group, self.segment)
                if at <= self.begun:
                    self.recognise(at < self.begun or self.digest.hexdigest() == self.promised)
                else:
                    self.now = self.advanced(grid(ids, self.device))
                    yield self.now
            self.documents += [(text.document,) for text in group]
            if at >= self.begun and self.now is not None:
                done = self.finished(self.now)
                self.kept, self.now = done if self.kept is None else Memory.stack(self.kept, done), None
        self.recognise(at >= self.begun)

    def recognise(self, same: bool) -> None:
        """Raises `BadInput` (66) unless the texts are those of the file that is gone on from."""
        if not same:
            raise BadInput("--resume: the text is not the one that was begun; give that one, or leave --resume out")

    @torch.no_grad()
    def advanced(self, segment: Grid) -> Memory:
        """The memory after one more segment of every text that still has one."""
        B, method = len(segment.text), self.method
        tokens = segment.live.sum(1)
        before = method.unit.empty(B) if self.now is None else self.now
        after = method.compress(segment.text, segment.live, before, self.stopping(B))
        self.tokens += int(tokens.sum())
        self.spent += int((self.positions(before, after) + tokens)[tokens > 0].sum())
        return after

    def positions(self, before: Memory, after: Memory) -> Int[Tensor, " B"]:
        """Positions beside the text's own that compressing a segment put through the decoder, of each row."""
        reading, N = self.method.reading, after.block_lengths[:, -1]
        none, loop = torch.zeros_like(N), reading.generator == "self"
        lead = none + self.method.unit.lead * (reading.bos == "sink") + (before.tokens == 0) * (reading.bos == "first")
        before_text = lead + (before.lengths if reading.recurrent else none)
        behind = N if loop else none + (self.how.n or reading.fixed) * (reading.generator == "parallel")
        trigger = int(loop and reading.trigger == "insert")
        found = before_text + behind + trigger
        if reading.memory == "budgeted" and reading.budget is not None:
            condensed = (before.lengths > 0) & (before.lengths + N > reading.budget)
            found = found + condensed * (before_text + reading.fixed + trigger)
        return found

    def stopping(self, B: int) -> Stopping:
        """The rule of a segment, with its draws where there are any."""
        how, K, drawn = self.how, self.method.reading.fixed, None
        if how.stop == "sample":
            rows = torch.arange(B) + len(self.documents)
            drawn = draws("length", how.seed, 0, rows, self.segment - 1, K).to(self.device)
        return Stopping(how.stop, how.q, how.tau, how.n, drawn)

    def finished(self, memory: Memory) -> Memory:
        """Hard, and of no more vectors than a budget says."""
        fitted = memory if self.how.budget is None else memory.fit(self.how.budget)
        return replace(fitted, log_s=None).pack()

    def save(self, path: Path, key: Mapping[str, Any]) -> None:
        """All that is done, as one file; `key` is what the result depends on."""
        parts = {"now": self.now, "kept": self.kept}
        tensors = {f"{part}.{name}": x for part, held in parts.items() if held for name, x in held.tensors().items()}
        counts = {name: getattr(self, name) for name in COUNTS}
        save_artifact(path, tensors, KIND, {"key": dict(key), "digest": self.digest.hexdigest(), **counts})

    def load(self, path: Path, key: Mapping[str, Any]) -> None:
        """What `save` wrote, to go on from. Raises `Busy` (73) where it was begun with another key."""
        tensors, about = open_artifact(path, KIND)
        theirs: Mapping[str, Any] = about["key"]
        odd = next((name for name in sorted({*key, *theirs}) if key.get(name) != theirs.get(name)), None)
        if odd is not None:
            raise Busy(
                f"{path} was begun with {odd} {theirs.get(odd)}, asked is {key.get(odd)}; ask the same, or remove it"
            )
        for part in ("now", "kept"):
            own = {name.removeprefix(f"{part}."): x for name, x in tensors.items() if name.startswith(f"{part}.")}
            found = Memory(**{"log_s": None, **own}).to(self.device) if own else None
            setattr(self, part, found)
        self.begun, self.promised = (about["group"], about["segment"]), about["digest"]
        self.tokens, self.spent = about["tokens"], about["spent"]
