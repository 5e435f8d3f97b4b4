"""Process texts of any length in parallel, one segment at a time, with save and resume."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from laconic.batches.padding import PaddedIds
from laconic.compression.memory_file import SourceDocument
from laconic.data.documents.tokenize import iter_token_chunks
from laconic.data.tokenizer import Tokenizer
from laconic.errors import BusyError, InputError, UsageError
from laconic.storage.atomic import load_artifact, save_artifact
from laconic.storage.tensor_tree import named_tensors

CHANGED_TEXT = "--resume: the text differs from the one that was begun; give the same text, or remove --resume"

Value = TypeVar("Value")  # the result, one row per text


class TokenStream:
    """A text that arrives in chunks, as segments of token ids; only one segment is in memory at a time."""

    def __init__(
        self,
        name: str,
        chunks: Iterable[str],
        tokenizer: Tokenizer,
        segment_tokens: int,
        prefix_ids: Sequence[int] = (),
    ) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.digest = sha256()  # of the text
        self.prefix_ids = prefix_ids  # before the first token of the text
        self.segments: list[int] = []  # lengths of those returned so far
        self.bytes = 0  # of their text, approximately: a character may be split
        self.ids = iter_token_chunks(self.hash_chunks(chunks), tokenizer, segment_tokens)

    def hash_chunks(self, chunks: Iterable[str]) -> Iterator[str]:
        for chunk in chunks:
            self.digest.update(chunk.encode())
            yield chunk

    def next_segment(self) -> list[int]:
        """Return the ids of the next segment, empty at the end. Raises `InputError` if the whole text is empty."""
        ids = next(self.ids, [])
        if ids:
            self.bytes += len(self.tokenizer.decode(ids).encode())
            ids = ids if self.segments else [*self.prefix_ids, *ids]
            self.segments.append(len(ids))
        elif not self.segments:
            raise InputError(f"{self.name}: empty; give a text to compress")
        return ids

    def to_document(self) -> SourceDocument:
        return SourceDocument(self.name, self.digest.hexdigest(), sum(self.segments), tuple(self.segments))


def pad_segments(rows: Sequence[Sequence[int]], device: torch.device) -> PaddedIds:
    T = max(map(len, rows))
    text = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=device)
    counts = torch.tensor([len(row) for row in rows], device=device)
    return PaddedIds(text, torch.arange(T, device=device) < counts[:, None])


class ResumableReading(ABC, Generic[Value]):
    """Job that processes groups of texts in parallel, one segment at a time, with save and resume."""

    kind: ClassVar[str]  # artifact kind of the partial file
    counters: ClassVar[tuple[str, ...]] = ("group", "next_piece", "tokens")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.done: Value | None = None  # rows of the finished groups
        self.texts: list[TokenStream] = []  # texts of the finished groups
        self.current: Value | None = None  # rows of the group in progress
        self.names: list[str] = []  # of the texts of the group in progress
        self.group, self.next_piece = 0, 0  # the group in progress, and how many of its segments were read
        self.tokens = 0
        self.digest = sha256()  # of all ids
        # a resumed job: the group and number of segments at which it continues, and the digest and tokens until there
        self.resume_at = (0, 0)
        self.expected_digest = ""
        self.previous_tokens = 0

    @property
    def note(self) -> str:
        """Text that is shown beside the progress."""
        return ""

    def count_bytes(self, dtype: torch.dtype | None) -> int:
        """Return the bytes of all rows so far, with floating-point numbers in `dtype`; None: as they are."""
        total = 0
        for _, x in named_tensors((self.current, self.done)):
            stored = dtype if dtype is not None and x.is_floating_point() else x.dtype
            total += x.numel() * stored.itemsize
        return total

    @abstractmethod
    def advance(self, piece: PaddedIds) -> Value:
        """Return the current value after one more segment of each text that still has one."""

    @abstractmethod
    def append_rows(self, before: Value | None, done: Value) -> Value:
        """Return the finished rows with those of another group."""

    @abstractmethod
    def to_tensors(self, value: Value, prefix: str) -> tuple[Mapping[str, Tensor], Any]:
        """Return named tensors and a JSON description from which `from_tensors` rebuilds the value."""

    @abstractmethod
    def from_tensors(self, spec: Any, tensors: Mapping[str, Tensor], prefix: str) -> Value:
        """Rebuild a value."""

    def run(self, groups: Iterable[Sequence[TokenStream]]) -> Iterator[int]:
        """Yield the tokens read so far after each segment; at the end all rows are in `done`."""
        position = (0, 0)
        for group_number, group in enumerate(groups):
            self.group, self.next_piece = group_number, 0
            self.names = [text.name for text in group]
            while any(segments := [text.next_segment() for text in group]):
                self.next_piece += 1
                self.digest.update(repr(segments).encode())
                position = (self.group, self.next_piece)
                if position == self.resume_at and self.digest.hexdigest() != self.expected_digest:
                    raise InputError(CHANGED_TEXT)
                if position > self.resume_at:
                    self.current = self.advance(pad_segments(segments, self.device))
                    yield self.tokens
            self.texts += group
            if position >= self.resume_at and self.current is not None:
                self.done = self.append_rows(self.done, self.current)
                self.current = None
        if position < self.resume_at:
            raise InputError(CHANGED_TEXT)

    def finish(self, groups: Iterable[Sequence[TokenStream]]) -> Value:
        """Run to the end and return all rows. Raises `UsageError` if there are none."""
        for _ in self.run(groups):
            pass
        if self.done is None:
            raise UsageError("no text is given; give one to read")
        return self.done

    def save(self, path: Path, key: Mapping[str, Any]) -> None:
        """Write the partial results to a file; `key` holds every setting that the result depends on."""
        tensors, specs = dict[str, Tensor](), dict[str, Any]()
        for part, value in (("current", self.current), ("done", self.done)):
            if value is not None:
                part_tensors, specs[part] = self.to_tensors(value, f"{part}.")
                tensors |= part_tensors
        counts = {name: getattr(self, name) for name in self.counters}
        metadata = {"key": dict(key), "digest": self.digest.hexdigest(), "specs": specs, **counts}
        save_artifact(path, tensors, self.kind, metadata)

    def load(self, path: Path, key: Mapping[str, Any]) -> None:
        """Continue from a file that `save` wrote.

        Raises:
            BusyError: If the file was written with another key.
        """
        tensors, metadata = load_artifact(path, self.kind)
        theirs: Mapping[str, Any] = metadata["key"]
        for name in sorted({*key, *theirs}):
            if key.get(name) != theirs.get(name):
                both = f"{name} {theirs.get(name)}, not {key.get(name)}"
                raise BusyError(f"{path} was started with {both}; use that, or remove the file")
        for part, spec in metadata["specs"].items():
            setattr(self, part, self.from_tensors(spec, tensors, f"{part}."))
        for name in self.counters:
            setattr(self, name, metadata[name])
        self.resume_at = (self.group, self.next_piece)
        self.expected_digest = metadata["digest"]
        self.previous_tokens = self.tokens
