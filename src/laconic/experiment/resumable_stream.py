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

from laconic.compression.memory_file import SourceDocument
from laconic.data.documents.tokenize import iter_token_chunks
from laconic.data.tokenizer import Tokenizer
from laconic.errors import BusyError, InputError
from laconic.storage.atomic import load_artifact, save_artifact

Value = TypeVar("Value")  # what texts become, a row for each


class TokenStream:
    """A text read once, as its parts come: the ids of its pieces, and at the end what is to be known of it."""

    def __init__(self, name: str, parts: Iterable[str], tokenizer: Tokenizer, segment_tokens: int) -> None:
        self.name, self.digest, self.tokenizer = name, sha256(), tokenizer
        self.segments: list[int] = []
        self.bytes = 0  # of the segments handed out, nearly: a character may be cut
        self.ids = iter_token_chunks(self.hash_parts(parts), tokenizer, segment_tokens)

    def hash_parts(self, parts: Iterable[str]) -> Iterator[str]:
        """The parts, hashed on their way."""
        for part in parts:
            self.digest.update(part.encode())
            yield part

    def next_segment(self) -> list[int]:
        """The ids of the next segment; none at the end. Raises `BadInput` (66) for a text without any."""
        found = next(self.ids, [])
        if found:
            self.segments.append(len(found))
            self.bytes += len(self.tokenizer.decode(found).encode())
        elif not self.segments:
            raise InputError(f"{self.name}: empty; give a text to compress")
        return found

    @property
    def to_document(self) -> SourceDocument:
        """What was read of it."""
        return SourceDocument(self.name, self.digest.hexdigest(), sum(self.segments), tuple(self.segments))


class PaddedIds(NamedTuple):
    """A segment of each text, padded on the right."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Bool[Tensor, "B T"]


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> PaddedIds:
    """Rows of ids as one matrix, and where it is live."""
    T = max(map(len, rows))
    text = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=device)
    counts = torch.tensor([len(row) for row in rows], device=device)
    return PaddedIds(text, torch.arange(T, device=device) < counts[:, None])


class ResumableReading(ABC, Generic[Value]):
    """Texts on their way: `kept` are the rows that are done, `now` those of the group under way.

    `tokens` were read. `digest` is of all ids, so that whoever goes on with what `save` wrote reads the same ones;
    `begun` is how far that was: groups from 0, pieces of it from 1, and `before_tokens` of all texts.
    """

    kind: ClassVar[str]  # of the file in which it is kept before it is done
    counters: ClassVar[tuple[str, ...]] = ("group", "piece", "tokens")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.done: Value | None = None
        self.current: Value | None = None
        self.texts: list[TokenStream] = []  # of groups that are done
        self.names: list[str] = []  # of the group under way
        self.digest, self.group, self.next_piece, self.tokens = sha256(), 0, 0, 0
        self.group_started, self.expected_documents, self.previous_tokens = (0, 0), "", 0

    @abstractmethod
    def advance(self, piece: PaddedIds) -> Value:
        """What is held after one more piece of every text that still has one."""

    @abstractmethod
    def append_rows(self, before: Value | None, done: Value) -> Value:
        """The rows that are done, with those of one more group."""

    @abstractmethod
    def to_tensors(self, held: Value, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        """Tensors by names that begin so, and what else it takes to build it again."""

    @abstractmethod
    def from_tensors(self, form: Any, tensors: Mapping[str, Tensor], prefix: str) -> Value:
        """The same from its parts."""

    def run(self, groups: Iterable[Sequence[TokenStream]]) -> Iterator[Value]:
        """What is held after each piece; when it ends, all rows are in `kept`.

        Raises `BadInput` (66) for a text without a token, and where the texts are not those of the file gone on from.
        """
        at = (0, 0)
        for self.group, group in enumerate(groups):
            self.next_piece, self.names = 0, [text.name for text in group]
            while any(ids := [text.next_segment() for text in group]):
                self.next_piece += 1
                self.digest.update(repr(ids).encode())
                at = (self.group, self.next_piece)
                if at <= self.group_started:
                    self.check_same_text(at < self.group_started or self.digest.hexdigest() == self.expected_documents)
                else:
                    self.current = self.advance(pad_rows(ids, self.device))
                    yield self.current
            self.texts += group
            if at >= self.group_started and self.current is not None:
                self.done, self.current = self.append_rows(self.done, self.current), None
        self.check_same_text(at >= self.group_started)

    def check_same_text(self, same: bool) -> None:
        """Raises `BadInput` (66) unless the texts are those of the file that is gone on from."""
        if not same:
            raise InputError("--resume: the text is not the one that was begun; give that one, or leave --resume out")

    def save(self, path: Path, key: Mapping[str, Any]) -> None:
        """All that is done, as one file; `key` is what the result depends on."""
        tensors, forms = dict[str, Tensor](), dict[str, Any]()
        for part, held in (("now", self.current), ("kept", self.done)):
            if held is not None:
                own, forms[part] = self.to_tensors(held, f"{part}.")
                tensors |= own
        counts = {name: getattr(self, name) for name in self.counters}
        about = {"key": dict(key), "digest": self.digest.hexdigest(), "forms": forms, **counts}
        save_artifact(path, tensors, self.kind, about)

    def load(self, path: Path, key: Mapping[str, Any]) -> None:
        """What `save` wrote, to go on from. Raises `Busy` (73) where it was begun with another key."""
        tensors, about = load_artifact(path, self.kind)
        theirs: Mapping[str, Any] = about["key"]
        odd = next((name for name in sorted({*key, *theirs}) if key.get(name) != theirs.get(name)), None)
        if odd is not None:
            raise BusyError(
                f"{path} was begun with {odd} {theirs.get(odd)}, asked is {key.get(odd)}; ask the same, or remove it"
            )
        for part, form in about["forms"].items():
            setattr(self, part, self.from_tensors(form, tensors, f"{part}."))
        for name in self.counters:
            setattr(self, name, about[name])
        self.group_started, self.expected_documents, self.previous_tokens = (
            (self.group, self.next_piece),
            about["digest"],
            self.tokens,
        )
