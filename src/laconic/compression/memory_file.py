"""Metadata of a saved memory (writer and reader weights, source texts), and its file format."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from laconic.console import to_html_table
from laconic.errors import CorruptArtifactError, NonFiniteError, UsageError
from laconic.storage.atomic import check_finite, load_artifact, save_artifact
from laconic.storage.strict_json import MAX_JSON_PARTS, to_canonical_json

FILE_KIND = "memory"
INDEPENDENT_FIELDS = ("laconic", "dtype", "documents", "created")  # may differ between memories that are concatenated
OVERWRITING_POLICIES = ("replace", "budgeted")  # memory policies by which a segment can overwrite older ones
STRING_FIELDS = ("laconic", "reader", "writer", "family", "positions", "bos", "dtype", "tokenizer", "created")
INT_FIELDS = ("layers", "width", "vocab")
RECOMPRESS_HINT = "load the run that wrote it or compress again"


@dataclass(frozen=True)
class SourceDocument:
    """A compressed text.

    Attributes:
        name: Name of the text, as a file name.
        sha256: SHA-256 of its UTF-8 bytes.
        tokens: Number of tokens.
        segments: Number of tokens of each segment.
        first: Index of its first segment in the memory.
    """

    name: str
    sha256: str
    tokens: int
    segments: tuple[int, ...]
    first: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "SourceDocument":
        """Parse a document entry. Raises `TypeError` or `KeyError` if it is malformed."""
        name, digest, tokens, first = (data[key] for key in ("name", "sha256", "tokens", "first"))
        numbers = [tokens, first, *data["segments"]]
        if not all(type(n) is int and n >= 0 for n in numbers) or {type(name), type(digest)} != {str}:
            raise TypeError("malformed document entry")
        return cls(name, digest, tokens, tuple(numbers[2:]), first)

    def slice_segments(self, start: int, stop: int) -> "SourceDocument | None":
        """Return the part in the segments `start` to `stop`, renumbered from 0; None if there is none."""
        low, high = max(start, self.first), min(stop, self.first + len(self.segments))
        if low >= high:
            return None
        return replace(self, segments=self.segments[low - self.first : high - self.first], first=low - start)


@dataclass(frozen=True)
class MemoryMetadata:
    """Describes which model wrote a memory, which model may read it, and what was compressed.

    Attributes:
        laconic: Version of laconic that wrote it.
        reader: Fingerprint of the weights that must read it.
        writer: Fingerprint of the weights that wrote it.
        family: Model family of the decoder.
        layers: Number of decoder layers.
        width: Hidden size of the decoder.
        vocab: Vocabulary size of the decoder.
        method: Resolved recipe tables of the method.
        positions: Scheme of position ids for memory and summaries.
        bos: When a bos token precedes the memory.
        dtype: dtype of the stored vectors.
        tokenizer: SHA-256 of tokenizer.json.
        created: Time of writing.
        documents: The compressed texts of each row.
    """

    laconic: str
    reader: str
    writer: str
    family: str
    layers: int
    width: int
    vocab: int
    method: Mapping[str, Any]
    positions: str
    bos: str
    dtype: str
    tokenizer: str
    created: str
    documents: tuple[tuple[SourceDocument, ...], ...] = ()

    @property
    def summary(self) -> str | None:
        """How the vectors were computed: parallel, self, pool or select; None if unknown."""
        return self.method.get("compression", {}).get("summary")

    @property
    def is_overwriting(self) -> bool:
        """Whether a segment's vectors may also summarise older segments."""
        return self.method.get("compression", {}).get("memory_policy") in OVERWRITING_POLICIES

    @property
    def origin(self) -> tuple[object, ...]:
        """The weights that wrote and may read a memory, the method, and the texts."""
        return self.reader, self.writer, self.tokenizer, self.method, self.positions, self.bos, self.documents

    def select_rows(self, rows: Sequence[int]) -> "MemoryMetadata":
        """Return the metadata of some rows."""
        return replace(self, documents=tuple(self.documents[row] for row in rows))

    def slice_segments(self, start: int, stop: int) -> "MemoryMetadata":
        """Return the metadata of the segments `start` to `stop`."""
        cut = ([document.slice_segments(start, stop) for document in row] for row in self.documents)
        return replace(self, documents=tuple(tuple(part for part in row if part is not None) for row in cut))

    @staticmethod
    def concat_rows(parts: Sequence["MemoryMetadata"]) -> "MemoryMetadata":
        """Return the metadata of the rows of all parts."""
        return replace(parts[0], documents=tuple(row for part in parts for row in part.documents))

    @staticmethod
    def concat_segments(parts: Sequence["MemoryMetadata"], starts: Sequence[int]) -> "MemoryMetadata":
        """Return the metadata of memories side by side, whose first segments become those in `starts`."""
        moved = [
            [tuple(replace(document, first=document.first + start) for document in row) for row in part.documents]
            for part, start in zip(parts, starts, strict=True)
        ]
        return replace(parts[0], documents=tuple(sum(rows, ()) for rows in zip(*moved, strict=True)))

    def check_reader(self, file: str, reader: "MemoryMetadata") -> None:
        """Check that a model may read this memory, and report the first mismatch.

        Args:
            file: Name of the memory's file, for the message.
            reader: Metadata that the model would write.

        Raises:
            CorruptArtifactError: If it may not.
        """
        check_reader_type(file, self, reader)
        if self.width != reader.width:
            raise CorruptArtifactError(
                f"memory: {file} has vectors of width {self.width} ({self.family}), this model reads {reader.width} "
                f"({reader.family}); {RECOMPRESS_HINT}"
            )
        if self.reader != reader.reader:
            raise CorruptArtifactError(
                f"memory: {file} was written for weights {abbreviate_hash(self.reader)} ({self.family}, width "
                f"{self.width}), this model is {abbreviate_hash(reader.reader)} ({reader.family}, width "
                f"{reader.width}); {RECOMPRESS_HINT}"
            )
        for name, theirs, ours in (
            ("positions", self.positions, reader.positions),
            ("bos", self.bos, reader.bos),
            ("tokenizer", abbreviate_hash(self.tokenizer), abbreviate_hash(reader.tokenizer)),
        ):
            if theirs != ours:
                raise CorruptArtifactError(
                    f"memory: {file} was written with {name} {theirs}, this run has {name} {ours}; {RECOMPRESS_HINT}"
                )

    def check_joinable(self, operation: str, other: "MemoryMetadata") -> None:
        """Raise `CorruptArtifactError` if two memories were not written by the same model."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name not in INDEPENDENT_FIELDS and mine != theirs:
                raise CorruptArtifactError(
                    f"{operation}: the memories differ in {field.name}: {format_setting(mine)} and "
                    f"{format_setting(theirs)}; compress both with one run"
                )

    @classmethod
    def from_json(cls, file: str, data: Mapping[str, Any]) -> "MemoryMetadata":
        """Parse the metadata of a file.

        Raises:
            CorruptArtifactError: If a field is malformed.
        """
        types = {**dict.fromkeys(STRING_FIELDS, str), **dict.fromkeys(INT_FIELDS, int), "method": dict}
        metadata = cls(**parse_metadata(file, data, types))
        if not isinstance(metadata.method.get("compression"), dict):
            raise bad_field_error(file, "method")
        return metadata


def parse_metadata(file: str, data: Mapping[str, Any], types: Mapping[str, type]) -> dict[str, Any]:
    """Check the metadata of a memory file, and return its fields.

    Args:
        file: Name of the file, for messages.
        data: The JSON object in the file.
        types: Type of each field but `documents`.

    Raises:
        CorruptArtifactError: If a field is malformed.
    """
    bad = next((name for name, type_ in types.items() if type(data.get(name)) is not type_), None)
    if bad is not None:
        raise bad_field_error(file, bad)
    try:
        rows = tuple(tuple(SourceDocument.from_json(entry) for entry in row) for row in data["documents"])
    except (KeyError, TypeError, AttributeError):
        raise bad_field_error(file, "documents") from None
    return {name: data[name] for name in types} | {"documents": rows}


def bad_field_error(file: str, name: str) -> CorruptArtifactError:
    """Return the error for a malformed field."""
    return CorruptArtifactError(f"memory: {file}: invalid metadata field {name}; use an intact copy")


def check_reader_type(file: str, metadata: object, reader: object) -> None:
    """Raise `UsageError` if the reader of a memory is given as anything but metadata of the same kind."""
    if type(reader) is not type(metadata):
        raise UsageError(
            f"memory: {file}: reader must be {type(metadata).__name__}, not {type(reader).__name__}; call "
            "load_memory of a LanguageModel or a TextCompressor, which checks that the file fits"
        )


def memory_to_html(
    documents: Sequence[Sequence[SourceDocument]],
    unit: str,
    num_tokens: Int[Tensor, " B"],
    sizes: Shaped[Tensor, " B"],
) -> str:
    """Return a table with the texts of each row, if they are known, their tokens, and how many `unit` they became."""
    names = [", ".join(document.name for document in row) for row in documents] or map(str, range(len(sizes)))
    cells = zip(names, num_tokens, sizes, strict=True)
    return to_html_table(
        ("text", "tokens", unit),
        [(name, f"{int(n):,}", f"{float(size):,.1f}".removesuffix(".0")) for name, n, size in cells],
    )


def abbreviate_hash(fingerprint: str) -> str:
    """Shorten a hash to its ends."""
    return f"{fingerprint[:4]}…{fingerprint[-2:]}" if len(fingerprint) > 40 else fingerprint


def format_setting(value: object) -> str:
    """Format a value in at most 60 characters, and a hash shorter."""
    text = abbreviate_hash(value) if isinstance(value, str) else to_canonical_json(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def check_file_path(path: Path) -> None:
    """Raise `UsageError` if a memory is to be saved where there is a folder."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a file, such as {path / 'memory.safetensors'}")


def save_memory(path: Path, tensors: Mapping[str, Tensor], metadata: MemoryMetadata) -> None:
    """Write tensors and metadata.

    Raises:
        UsageError: If `path` is a folder, or there are more documents than a header can hold.
    """
    check_file_path(path)
    data = asdict(metadata)
    text = to_canonical_json(data)
    if sum(map(text.count, ",[{")) > MAX_JSON_PARTS // 2:
        raise UsageError(
            f"{path}: {len(metadata.documents):,} texts are too many for one memory file; write several files"
        )
    save_artifact(path, tensors, FILE_KIND, data, is_named=True)


def load_memory(path: Path) -> tuple[dict[str, Tensor], MemoryMetadata]:
    """Read what `save_memory` wrote, memory-mapped.

    Raises:
        CorruptArtifactError: If tensors are missing, inconsistent or not finite.
        InputError: If there is no such file.
    """
    tensors, data = load_artifact(path, FILE_KIND)
    metadata = MemoryMetadata.from_json(path.name, data)
    check_tensors(path.name, first_invalid_tensor(tensors, metadata), {"vectors": tensors.get("vectors")})
    return tensors, metadata


def check_tensors(file: str, bad: str | None, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise `CorruptArtifactError` for a tensor that is missing or inconsistent, or for numbers that are not finite.

    Args:
        file: Name of the file, for the message.
        bad: Name of a tensor that is missing or inconsistent with the others, if any.
        tensors: Tensors whose numbers are checked.
    """
    if bad is not None:
        raise CorruptArtifactError(
            f"memory: {file}: {bad} is missing or inconsistent with the other tensors; use an intact copy"
        )
    try:
        for name, tensor in tensors.items():
            if tensor is not None:
                check_finite(name, tensor)
    except NonFiniteError as error:
        raise CorruptArtifactError(f"memory: {file}: {error}; compress again") from None


def first_invalid_tensor(tensors: Mapping[str, Tensor], metadata: MemoryMetadata) -> str | None:
    """Return the name of a tensor that is missing, unknown, or inconsistent with the others; None if all are good."""
    dimensions = {"vectors": 2, "offsets": 1, "segment_ids": 1, "segment_tokens": 2}
    bad = min(tensors.keys() ^ dimensions.keys(), default=None)
    if bad is not None:
        return bad
    for name, ndim in dimensions.items():
        x = tensors[name]
        if x.ndim != ndim or (x.dtype != torch.long if name != "vectors" else not x.is_floating_point()):
            return name
    vectors, offsets, segment_ids, segment_tokens = (tensors[name] for name in dimensions)
    num_rows, lengths = len(metadata.documents), offsets.diff()
    if vectors.shape[1] != metadata.width or vectors.dtype.itemsize == 1:
        return "vectors"
    if len(offsets) != num_rows + 1 or offsets[0] != 0 or offsets[-1] != len(vectors) or bool((lengths < 0).any()):
        return "offsets"
    tokens = [sum(sum(document.segments) for document in row) for row in metadata.documents]
    if segment_tokens.shape[0] != num_rows or bool((segment_tokens < 0).any()):
        return "segment_tokens"
    if not torch.equal(segment_tokens.sum(1), torch.tensor(tokens, dtype=torch.long)):
        return "segment_tokens"
    if len(segment_ids) != len(vectors) or not bool(
        ((segment_ids >= 0) & (segment_ids < segment_tokens.shape[1])).all()
    ):
        return "segment_ids"
    row = torch.arange(num_rows).repeat_interleave(lengths)
    is_sorted = (segment_ids.diff() >= 0) | (row.diff() > 0)
    return None if bool(is_sorted.all()) else "segment_ids"
