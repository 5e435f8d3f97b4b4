"""Texts of any length read side by side, a piece of each at a time; what is done can be kept and gone on from.

Of a text only one piece is held, besides the tokenizer's window.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.core.artifact import open_artifact, save_artifact
from laconic.core.errors import BadInput, Busy
from laconic.core.provenance import Document
from laconic.data.streaming import pieces
from laconic.data.tokens import Tokenizer

Held = TypeVar("Held")  # what texts become, a row for each


class Text:
    """A text read once, as its parts come: the ids of its pieces, and at the end what is to be known of it."""

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


class Going(ABC, Generic[Held]):
    """Texts on their way: `kept` are the rows that are done, `now` those of the group under way.

    `tokens` were read. `digest` is of all ids, so that whoever goes on with what `save` wrote reads the same ones;
    `begun` is how far that was: groups from 0, pieces of it from 1, and `before_tokens` of all texts.
    """

    kind: ClassVar[str]  # of the file in which it is kept before it is done
    counts: ClassVar[tuple[str, ...]] = ("group", "piece", "tokens")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept: Held | None = None
        self.now: Held | None = None
        self.texts: list[Text] = []  # of groups that are done
        self.names: list[str] = []  # of the group under way
        self.digest, self.group, self.piece, self.tokens = sha256(), 0, 0, 0
        self.begun, self.promised, self.before_tokens = (0, 0), "", 0

    @abstractmethod
    def advanced(self, piece: Grid) -> Held:
        """What is held after one more piece of every text that still has one."""

    @abstractmethod
    def joined(self, before: Held | None, done: Held) -> Held:
        """The rows that are done, with those of one more group."""

    @abstractmethod
    def apart(self, held: Held, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        """Tensors by names that begin so, and what else it takes to build it again."""

    @abstractmethod
    def built(self, form: Any, tensors: Mapping[str, Tensor], prefix: str) -> Held:
        """The same from its parts."""

    def run(self, groups: Iterable[Sequence[Text]]) -> Iterator[Held]:
        """What is held after each piece; when it ends, all rows are in `kept`.

        Raises `BadInput` (66) for a text without a token, and where the texts are not those of the file gone on from.
        """
        at = (0, 0)
        for self.group, group in enumerate(groups):
            self.piece, self.names = 0, [text.name for text in group]
            while any(ids := [text.next() for text in group]):
                self.piece += 1
                self.digest.update(repr(ids).encode())
                at = (self.group, self.piece)
                if at <= self.begun:
                    self.recognise(at < self.begun or self.digest.hexdigest() == self.promised)
                else:
                    self.now = self.advanced(grid(ids, self.device))
                    yield self.now
            self.texts += group
            if at >= self.begun and self.now is not None:
                self.kept, self.now = self.joined(self.kept, self.now), None
        self.recognise(at >= self.begun)

    def recognise(self, same: bool) -> None:
        """Raises `BadInput` (66) unless the texts are those of the file that is gone on from."""
        if not same:
            raise BadInput("--resume: the text is not the one that was begun; give that one, or leave --resume out")

    def save(self, path: Path, key: Mapping[str, Any]) -> None:
        """All that is done, as one file; `key` is what the result depends on."""
        tensors, forms = dict[str, Tensor](), dict[str, Any]()
        for part, held in (("now", self.now), ("kept", self.kept)):
            if held is not None:
                own, forms[part] = self.apart(held, f"{part}.")
                tensors |= own
        counts = {name: getattr(self, name) for name in self.counts}
        about = {"key": dict(key), "digest": self.digest.hexdigest(), "forms": forms, **counts}
        save_artifact(path, tensors, self.kind, about)

    def load(self, path: Path, key: Mapping[str, Any]) -> None:
        """What `save` wrote, to go on from. Raises `Busy` (73) where it was begun with another key."""
        tensors, about = open_artifact(path, self.kind)
        theirs: Mapping[str, Any] = about["key"]
        odd = next((name for name in sorted({*key, *theirs}) if key.get(name) != theirs.get(name)), None)
        if odd is not None:
            raise Busy(
                f"{path} was begun with {odd} {theirs.get(odd)}, asked is {key.get(odd)}; ask the same, or remove it"
            )
        for part, form in about["forms"].items():
            setattr(self, part, self.built(form, tensors, f"{part}."))
        for name in self.counts:
            setattr(self, name, about[name])
        self.begun, self.promised, self.before_tokens = (self.group, self.piece), about["digest"], self.tokens
