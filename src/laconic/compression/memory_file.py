"""Metadata of a saved memory (writer and reader weights, source texts), and its file format."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from laconic.config.config_model import drop_former_options
from laconic.errors import CorruptArtifactError, UsageError
from laconic.storage.strict_json import to_canonical_json

FILE_KIND = "memory"
OVERWRITING_POLICIES = ("replace", "budgeted")  # memory policies by which a segment can overwrite older ones
Count = Annotated[int, Field(ge=0)]
Metadata = TypeVar("Metadata", bound="BaseMetadata")


@dataclass(frozen=True)
class SourceDocument:
    """A compressed text: SHA-256 of its UTF-8 bytes, tokens of each segment, index of its first one in the memory."""

    name: str
    sha256: str
    tokens: Count
    segments: tuple[Count, ...]
    first: Count = 0

    def slice_segments(self, start: int, stop: int) -> "SourceDocument | None":
        """Return the part in the segments `start` to `stop`, renumbered from 0; None if it is empty."""
        low = max(start, self.first)
        high = min(stop, self.first + len(self.segments))
        if low >= high:
            return None
        return replace(self, segments=self.segments[low - self.first : high - self.first], first=low - start)


@dataclass(frozen=True, kw_only=True)
class BaseMetadata(ABC):
    """What the files of all memories record: version of laconic, model, SHA-256 of tokenizer.json, rows of texts."""

    READER_FIELDS: ClassVar[dict[str, str]]  # which must be the reader's, and their names in messages
    JOINED_FIELDS: ClassVar[tuple[str, ...]]  # which must be equal in memories that are concatenated

    laconic: str
    family: str
    layers: int
    vocab: int
    tokenizer: str
    created: str
    dtype: str = "float32"
    documents: tuple[tuple[SourceDocument, ...], ...] = ()

    @property
    @abstractmethod
    def shape_text(self) -> str:
        """Family and sizes of the model, for messages."""

    @abstractmethod
    def first_invalid_tensor(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Return the name of a tensor that is missing, unknown, or inconsistent with others; None if all are good."""

    @property
    def origin(self) -> tuple[object, ...]:
        """The weights, method and texts that a memory comes from."""
        return tuple(getattr(self, name) for name in (*self.JOINED_FIELDS, "method", "documents"))

    def select_rows(self: Metadata, rows: Sequence[int]) -> Metadata:
        return replace(self, documents=tuple(self.documents[row] for row in rows))

    @staticmethod
    def concat_rows(parts: Sequence[Metadata]) -> Metadata:
        return replace(parts[0], documents=tuple(row for part in parts for row in part.documents))

    def check_reader(self, file: str, reader: "BaseMetadata") -> None:
        """Raise `CorruptArtifactError` unless a model that would write the metadata `reader` may read this memory."""
        if type(reader) is not type(self):
            raise UsageError(
                f"memory: {file}: reader must be {type(self).__name__}, not {type(reader).__name__}; call "
                "load_memory of a LanguageModel or a TextCompressor, which checks that the file fits"
            )
        for name, label in self.READER_FIELDS.items():
            theirs, ours = getattr(self, name), getattr(reader, name)
            if theirs != ours:
                raise CorruptArtifactError(
                    f"memory: {file} was written {label} {format_setting(theirs)} ({self.shape_text}), this model has "
                    f"{format_setting(ours)} ({reader.shape_text}); load the model that wrote it, or compress again"
                )

    def check_joinable(self, operation: str, other: "BaseMetadata") -> None:
        """Raise `CorruptArtifactError` if two memories were not written by the same model in the same way."""
        for name in self.JOINED_FIELDS:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise CorruptArtifactError(
                    f"{operation}: the memories differ in {name}: {format_setting(mine)} and "
                    f"{format_setting(theirs)}; compress both in the same way"
                )

    @classmethod
    def from_json(cls: type[Metadata], file: str, data: Mapping[str, Any]) -> Metadata:
        """Parse the metadata of a file. Raises `CorruptArtifactError` if a field is malformed."""
        try:
            return TypeAdapter(cls).validate_json(json.dumps(drop_former_options(data)), strict=True)
        except ValidationError as error:
            name = error.errors()[0]["loc"][0]
            raise CorruptArtifactError(f"memory: {file}: invalid metadata field {name}; use an intact copy") from None


@dataclass(frozen=True, kw_only=True)
class MemoryMetadata(BaseMetadata):
    """Describes which model wrote a memory, which model may read it, and what was compressed.

    `reader` and `writer` are fingerprints of weights, `method` has the resolved recipe tables.
    """

    READER_FIELDS: ClassVar = {
        "width": "with vectors of width", "reader": "for weights", "positions": "with positions", "bos": "with bos",
        "tokenizer": "with tokenizer",
    }  # fmt: skip
    JOINED_FIELDS: ClassVar = (
        "reader", "writer", "family", "layers", "width", "vocab", "method", "positions", "bos", "tokenizer",
    )  # fmt: skip

    reader: str
    writer: str
    width: int
    method: Mapping[str, Mapping[str, Any] | None]
    positions: str
    bos: str

    @property
    def shape_text(self) -> str:
        return f"{self.family}, width {self.width}"

    @property
    def is_overwriting(self) -> bool:
        """Whether a segment's vectors may also summarise older segments."""
        return (self.method.get("compression") or {}).get("memory_policy") in OVERWRITING_POLICIES

    def slice_segments(self, start: int, stop: int) -> "MemoryMetadata":
        """Return the metadata of the segments `start` to `stop`."""
        cut = ([document.slice_segments(start, stop) for document in row] for row in self.documents)
        return replace(self, documents=tuple(tuple(part for part in row if part is not None) for row in cut))

    @staticmethod
    def concat_segments(parts: Sequence["MemoryMetadata"], starts: Sequence[int]) -> "MemoryMetadata":
        """Return the metadata of memories side by side, whose first segments become those in `starts`."""
        moved = [
            [tuple(replace(document, first=document.first + start) for document in row) for row in part.documents]
            for part, start in zip(parts, starts, strict=True)
        ]
        return replace(parts[0], documents=tuple(sum(rows, ()) for rows in zip(*moved, strict=True)))

    def first_invalid_tensor(self, tensors: Mapping[str, Tensor]) -> str | None:
        dimensions = {"vectors": 2, "offsets": 1, "segment_ids": 1, "segment_tokens": 2}
        bad = min(tensors.keys() ^ dimensions.keys(), default=None)
        if bad is not None:
            return bad
        for name, ndim in dimensions.items():
            x = tensors[name]
            if x.ndim != ndim or (x.dtype != torch.long if name != "vectors" else not x.is_floating_point()):
                return name
        vectors, offsets, segment_ids, segment_tokens = (tensors[name] for name in dimensions)
        num_rows = len(self.documents)
        lengths = offsets.diff()
        if vectors.shape[1] != self.width or vectors.dtype.itemsize == 1:
            return "vectors"
        if len(offsets) != num_rows + 1 or offsets[0] != 0 or offsets[-1] != len(vectors) or bool((lengths < 0).any()):
            return "offsets"
        tokens = [sum(sum(document.segments) for document in row) for row in self.documents]
        has_all_tokens = torch.equal(segment_tokens.sum(1), torch.tensor(tokens, dtype=torch.long))
        if not has_all_tokens or bool((segment_tokens < 0).any()):
            return "segment_tokens"
        is_segment = (segment_ids >= 0) & (segment_ids < segment_tokens.shape[1])
        if len(segment_ids) != len(vectors) or not bool(is_segment.all()):
            return "segment_ids"
        row = torch.arange(num_rows).repeat_interleave(lengths)
        is_sorted = (segment_ids.diff() >= 0) | (row.diff() > 0)
        return None if bool(is_sorted.all()) else "segment_ids"


def abbreviate_hash(fingerprint: str) -> str:
    """Shorten a hash to its ends."""
    return f"{fingerprint[:4]}…{fingerprint[-2:]}" if len(fingerprint) > 40 else fingerprint


def format_setting(value: object) -> str:
    """Format a value in at most 60 characters, and a hash shorter."""
    text = abbreviate_hash(value) if isinstance(value, str) else to_canonical_json(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
