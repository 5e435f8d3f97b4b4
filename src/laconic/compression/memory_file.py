"""Where a memory comes from: which weights wrote it, which may read it, of which texts it is; and its file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.errors import CorruptArtifactError, NonFiniteError, UsageError
from laconic.storage.atomic import check_finite, load_artifact, save_artifact
from laconic.storage.strict_json import MAX_JSON_PARTS, to_canonical_json

FORMAT_VERSION = 1  # the newest that is read
FILE_KIND = "memory"
INDEPENDENT_FIELDS = (
    "laconic",
    "dtype",
    "documents",
    "created",
)  # what memories may differ in and still stand side by side
OVERWRITING_POLICIES = ("replace", "budgeted")  # policies by which a block takes the place of older ones
STRING_FIELDS = ("laconic", "reader", "writer", "family", "positions", "bos", "dtype", "tokenizer", "created")
INT_FIELDS = ("schema", "layers", "width", "vocab")
RECOMPRESS_HINT = "load the run that wrote it or compress again"


@dataclass(frozen=True)
class SourceDocument:
    """A text that was read: its SHA-256 (UTF-8), its tokens, those of each segment, and the block of the first one."""

    name: str
    sha256: str
    tokens: int
    segments: tuple[int, ...]
    first: int = 0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "SourceDocument":
        """One of a file's. Raises `TypeError` or `KeyError` for what is none."""
        name, digest, tokens, first = (data[key] for key in ("name", "sha256", "tokens", "first"))
        numbers = [tokens, first, *data["segments"]]
        if not all(type(n) is int and n >= 0 for n in numbers) or {type(name), type(digest)} != {str}:
            raise TypeError("no document")
        return cls(name, digest, tokens, tuple(numbers[2:]), first)

    def slice_segments(self, start: int, stop: int) -> "SourceDocument | None":
        """What of it lies in the blocks `start` to `stop`, whose first is then 0; None is nothing."""
        low, high = max(start, self.first), min(stop, self.first + len(self.segments))
        if low >= high:
            return None
        return replace(self, segments=self.segments[low - self.first : high - self.first], first=low - start)


@dataclass(frozen=True)
class MemoryMetadata:
    """What must agree before a memory is read, and what a reader may want to know of it; `documents` are by row.

    `reader` is the fingerprint of the weights that must read it, `writer` of those that wrote it; `width` and `vocab`
    are the decoder's; `method` holds the resolved tables of the recipe; `tokenizer` is the SHA-256 of tokenizer.json.
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
    recurrent: bool
    dtype: str
    tokenizer: str
    created: str
    documents: tuple[tuple[SourceDocument, ...], ...] = ()
    schema: int = FORMAT_VERSION

    @property
    def method_digest(self) -> str:
        """SHA-256 of `method`."""
        return sha256(to_canonical_json(self.method).encode()).hexdigest()

    @property
    def generator(self) -> str | None:
        """How the vectors arose: parallel, self, pool, select; None where the settings do not say."""
        return self.method.get("compression", {}).get("summary")

    @property
    def is_overwriting(self) -> bool:
        """Whether a block may stand for the text of older ones too."""
        return self.method.get("compression", {}).get("memory_policy") in OVERWRITING_POLICIES

    def select_rows(self, rows: Sequence[int]) -> "MemoryMetadata":
        """That of some rows."""
        return replace(self, documents=tuple(self.documents[row] for row in rows))

    def slice_segments(self, start: int, stop: int) -> "MemoryMetadata":
        """That of the blocks `start` to `stop`."""
        cut = ([each.slice_segments(start, stop) for each in row] for row in self.documents)
        return replace(self, documents=tuple(tuple(each for each in row if each is not None) for row in cut))

    @staticmethod
    def concat_rows(all_: Sequence["MemoryMetadata"]) -> "MemoryMetadata":
        """That of the rows of all."""
        return replace(all_[0], documents=tuple(row for each in all_ for row in each.documents))

    @staticmethod
    def concat_segments(all_: Sequence["MemoryMetadata"], starts: Sequence[int]) -> "MemoryMetadata":
        """That of memories side by side, of which each begins with the block that `starts` says."""
        moved = [
            [tuple(replace(each, first=each.first + start) for each in row) for row in about.documents]
            for about, start in zip(all_, starts, strict=True)
        ]
        return replace(all_[0], documents=tuple(sum(rows, ()) for rows in zip(*moved, strict=True)))

    def check_reader(self, file: str, reader: "MemoryMetadata") -> None:
        """Raises `Damaged` (76) unless the reader of `ours` may read what this stands for; the first reason counts."""
        if self.width != reader.width:
            raise CorruptArtifactError(
                f"memory: {file} has vectors of width {self.width} ({self.family}), this model reads {reader.width} "
                f"({reader.family}); {RECOMPRESS_HINT}"
            )
        if self.reader != reader.reader:
            raise CorruptArtifactError(
                f"memory: {file} was written for weights {abbreviate_hash(self.reader)} ({self.family}, width {self.width}), "
                f"this model is {abbreviate_hash(reader.reader)} ({reader.family}, width {reader.width}); {RECOMPRESS_HINT}"
            )
        for what, theirs, here in (
            ("positions", self.positions, reader.positions),
            ("bos", self.bos, reader.bos),
            ("tokenizer", abbreviate_hash(self.tokenizer), abbreviate_hash(reader.tokenizer)),
        ):
            if theirs != here:
                raise CorruptArtifactError(
                    f"memory: {file} was written with {what} {theirs}, this run has {what} {here}; {RECOMPRESS_HINT}"
                )

    def check_joinable(self, operation: str, other: "MemoryMetadata") -> None:
        """Raises `Damaged` (76) where the two cannot stand side by side."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name not in INDEPENDENT_FIELDS and mine != theirs:
                raise CorruptArtifactError(
                    f"{operation}: memories of another {field.name}, {abbreviate(mine)} beside {abbreviate(theirs)}; "
                    "compress both with one run"
                )

    def to_json(self) -> dict[str, Any]:
        """As JSON has it, with the SHA-256 of the settings."""
        return {**asdict(self), "settings": self.method_digest}

    @classmethod
    def from_json(cls, file: str, data: Mapping[str, Any]) -> "MemoryMetadata":
        """What `plain` gave. Raises `Damaged` (76) for a newer schema, and for what is no provenance."""
        schema = data.get("schema")
        if type(schema) is int and schema > FORMAT_VERSION:
            raise CorruptArtifactError(
                f"memory: {file} has schema {schema}, this laconic reads up to {FORMAT_VERSION}; take a newer one"
            )
        kinds = {
            **dict.fromkeys(STRING_FIELDS, str),
            **dict.fromkeys(INT_FIELDS, int),
            "method": dict,
            "recurrent": bool,
        }
        odd = next((name for name, kind in kinds.items() if type(data.get(name)) is not kind), None)
        if odd is None and not isinstance(data["method"].get("compression"), dict):
            odd = "method"
        try:
            rows = tuple(tuple(SourceDocument.from_json(each) for each in row) for row in data["documents"])
        except (KeyError, TypeError, AttributeError):
            odd, rows = odd or "documents", ()
        if odd is None:
            made = cls(**{name: data[name] for name in kinds}, documents=rows)
            odd = None if data.get("settings") == made.method_digest else "settings"
            if odd is None:
                return made
        raise CorruptArtifactError(f"memory: {file}: its provenance has no sound {odd}; take another copy")


def abbreviate_hash(fingerprint: str) -> str:
    """The ends of a hash."""
    return f"{fingerprint[:4]}…{fingerprint[-2:]}" if len(fingerprint) > 40 else fingerprint


def abbreviate(value: object) -> str:
    """A value as far as it fits into a line."""
    return abbreviate_hash(value) if isinstance(value, str) else to_canonical_json(value)[:60]


def save_memory(path: Path, tensors: Mapping[str, Tensor], metadata: MemoryMetadata) -> None:
    """A memory's file: its tensors, and the provenance in the header. Raises `Usage` (2) for too many documents."""
    plain = metadata.to_json()
    parts = to_canonical_json(plain).count(",") + sum(map(to_canonical_json(plain).count, "[{"))
    if parts > MAX_JSON_PARTS // 2:
        raise UsageError(f"{path}: {len(metadata.documents):,} texts are more than one file describes; write several")
    save_artifact(path, tensors, FILE_KIND, plain)


def load_memory(path: Path) -> tuple[dict[str, Tensor], MemoryMetadata]:
    """What `written` wrote, mapped. Raises `Damaged` (76) for what does not fit together or is not finite."""
    tensors, found = load_artifact(path, FILE_KIND)
    about = MemoryMetadata.from_json(path.name, found)
    odd = first_bad_tensor(tensors, about)
    if odd is not None:
        raise CorruptArtifactError(
            f"memory: {path.name}: {odd} is missing or does not fit the others; take another copy"
        )
    try:
        check_finite("vectors", tensors["vectors"])
    except NonFiniteError as error:
        raise CorruptArtifactError(f"memory: {path.name}: {error}; compress again") from None
    return tensors, about


def first_bad_tensor(tensors: Mapping[str, Tensor], metadata: MemoryMetadata) -> str | None:
    """The name of a tensor that a memory must have and has not, or has and must not, or that fits no other."""
    asked = {"vectors": 2, "offsets": 1, "block": 1, "spans": 2}
    odd = min(tensors.keys() ^ asked.keys(), default=None)
    if odd is not None:
        return odd
    for name, ndim in asked.items():
        x = tensors[name]
        if x.ndim != ndim or (x.dtype != torch.long if name != "vectors" else not x.is_floating_point()):
            return name
    vectors, offsets, block, spans = (tensors[name] for name in asked)
    rows, lengths = len(metadata.documents), offsets.diff()
    if vectors.shape[1] != metadata.width or vectors.dtype.itemsize == 1:
        return "vectors"
    if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != len(vectors) or bool((lengths < 0).any()):
        return "offsets"
    read = torch.tensor([sum(sum(each.segments) for each in row) for row in metadata.documents], dtype=torch.long)
    if spans.shape[0] != rows or bool((spans < 0).any()) or not torch.equal(spans.sum(1), read):
        return "spans"
    row = torch.arange(rows).repeat_interleave(lengths)
    rising = block.diff() >= 0
    sound = len(block) == len(vectors) and bool(((block >= 0) & (block < spans.shape[1])).all())
    return None if sound and bool((rising | (row.diff() > 0)).all()) else "block"
