"""Where a memory comes from: which weights wrote it, which may read it, of which texts it is; and its file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.core.artifact import check_finite, open_artifact, save_artifact
from laconic.core.errors import Damaged, NonFinite, Usage
from laconic.core.strict import JSON_PARTS, canonical

SCHEMA = 1  # the newest that is read
KIND = "memory"
LOCAL = ("laconic", "dtype", "documents", "created")  # what memories may differ in and still stand side by side
WHOLE = ("replace", "budgeted")  # policies by which a block takes the place of older ones
TEXTS = ("laconic", "reader", "writer", "family", "positions", "bos", "dtype", "tokenizer", "created")
NUMBERS = ("schema", "layers", "width", "vocab")
AGAIN = "load the run that wrote it or compress again"


@dataclass(frozen=True)
class Document:
    """A text that was read: its SHA-256 (UTF-8), its tokens, those of each segment, and the block of the first one."""

    name: str
    sha256: str
    tokens: int
    segments: tuple[int, ...]
    first: int = 0

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> "Document":
        """One of a file's. Raises `TypeError` or `KeyError` for what is none."""
        name, digest, tokens, first = (found[key] for key in ("name", "sha256", "tokens", "first"))
        numbers = [tokens, first, *found["segments"]]
        if not all(type(n) is int and n >= 0 for n in numbers) or {type(name), type(digest)} != {str}:
            raise TypeError("no document")
        return cls(name, digest, tokens, tuple(numbers[2:]), first)

    def slice(self, start: int, stop: int) -> "Document | None":
        """What of it lies in the blocks `start` to `stop`, whose first is then 0; None is nothing."""
        low, high = max(start, self.first), min(stop, self.first + len(self.segments))
        if low >= high:
            return None
        return replace(self, segments=self.segments[low - self.first : high - self.first], first=low - start)


@dataclass(frozen=True)
class Provenance:
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
    documents: tuple[tuple[Document, ...], ...] = ()
    schema: int = SCHEMA

    @property
    def settings(self) -> str:
        """SHA-256 of `method`."""
        return sha256(canonical(self.method).encode()).hexdigest()

    @property
    def generator(self) -> str | None:
        """How the vectors arose: parallel, self, pool, select; None where the settings do not say."""
        return self.method.get("reading", {}).get("generator")

    @property
    def whole(self) -> bool:
        """Whether a block may stand for the text of older ones too."""
        return self.method.get("reading", {}).get("memory") in WHOLE

    def take(self, rows: Sequence[int]) -> "Provenance":
        """That of some rows."""
        return replace(self, documents=tuple(self.documents[row] for row in rows))

    def slice(self, start: int, stop: int) -> "Provenance":
        """That of the blocks `start` to `stop`."""
        cut = ([each.slice(start, stop) for each in row] for row in self.documents)
        return replace(self, documents=tuple(tuple(each for each in row if each is not None) for row in cut))

    @staticmethod
    def stack(all_: Sequence["Provenance"]) -> "Provenance":
        """That of the rows of all."""
        return replace(all_[0], documents=tuple(row for each in all_ for row in each.documents))

    @staticmethod
    def join(all_: Sequence["Provenance"], starts: Sequence[int]) -> "Provenance":
        """That of memories side by side, of which each begins with the block that `starts` says."""
        moved = [
            [tuple(replace(each, first=each.first + start) for each in row) for row in about.documents]
            for about, start in zip(all_, starts, strict=True)
        ]
        return replace(all_[0], documents=tuple(sum(rows, ()) for rows in zip(*moved, strict=True)))

    def check(self, file: str, ours: "Provenance") -> None:
        """Raises `Damaged` (76) unless the reader of `ours` may read what this stands for; the first reason counts."""
        if self.width != ours.width:
            raise Damaged(
                f"memory: {file} has vectors of width {self.width} ({self.family}), this model reads {ours.width} "
                f"({ours.family}); {AGAIN}"
            )
        if self.reader != ours.reader:
            raise Damaged(
                f"memory: {file} was written for weights {short(self.reader)} ({self.family}, width {self.width}), "
                f"this model is {short(ours.reader)} ({ours.family}, width {ours.width}); {AGAIN}"
            )
        for what, theirs, here in (
            ("positions", self.positions, ours.positions),
            ("bos", self.bos, ours.bos),
            ("tokenizer", short(self.tokenizer), short(ours.tokenizer)),
        ):
            if theirs != here:
                raise Damaged(f"memory: {file} was written with {what} {theirs}, this run has {what} {here}; {AGAIN}")

    def check_same(self, what: str, other: "Provenance") -> None:
        """Raises `Damaged` (76) where the two cannot stand side by side."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name not in LOCAL and mine != theirs:
                raise Damaged(
                    f"{what}: memories of another {field.name}, {brief(mine)} beside {brief(theirs)}; "
                    "compress both with one run"
                )

    def plain(self) -> dict[str, Any]:
        """As JSON has it, with the SHA-256 of the settings."""
        return {**asdict(self), "settings": self.settings}

    @classmethod
    def parse(cls, file: str, found: Mapping[str, Any]) -> "Provenance":
        """What `plain` gave. Raises `Damaged` (76) for a newer schema, and for what is no provenance."""
        schema = found.get("schema")
        if type(schema) is int and schema > SCHEMA:
            raise Damaged(f"memory: {file} has schema {schema}, this laconic reads up to {SCHEMA}; take a newer one")
        kinds = {**dict.fromkeys(TEXTS, str), **dict.fromkeys(NUMBERS, int), "method": dict, "recurrent": bool}
        odd = next((name for name, kind in kinds.items() if type(found.get(name)) is not kind), None)
        if odd is None and not isinstance(found["method"].get("reading"), dict):
            odd = "method"
        try:
            rows = tuple(tuple(Document.parse(each) for each in row) for row in found["documents"])
        except (KeyError, TypeError, AttributeError):
            odd, rows = odd or "documents", ()
        if odd is None:
            made = cls(**{name: found[name] for name in kinds}, documents=rows)
            odd = None if found.get("settings") == made.settings else "settings"
            if odd is None:
                return made
        raise Damaged(f"memory: {file}: its provenance has no sound {odd}; take another copy")


def short(fingerprint: str) -> str:
    """The ends of a hash."""
    return f"{fingerprint[:4]}…{fingerprint[-2:]}" if len(fingerprint) > 40 else fingerprint


def brief(value: object) -> str:
    """A value as far as it fits into a line."""
    return short(value) if isinstance(value, str) else canonical(value)[:60]


def written(path: Path, tensors: Mapping[str, Tensor], about: Provenance) -> None:
    """A memory's file: its tensors, and the provenance in the header. Raises `Usage` (2) for too many documents."""
    plain = about.plain()
    parts = canonical(plain).count(",") + sum(map(canonical(plain).count, "[{"))
    if parts > JSON_PARTS // 2:
        raise Usage(f"{path}: {len(about.documents):,} texts are more than one file describes; write several")
    save_artifact(path, tensors, KIND, plain)


def stored(path: Path) -> tuple[dict[str, Tensor], Provenance]:
    """What `written` wrote, mapped. Raises `Damaged` (76) for what does not fit together or is not finite."""
    tensors, found = open_artifact(path, KIND)
    about = Provenance.parse(path.name, found)
    odd = misfit(tensors, about)
    if odd is not None:
        raise Damaged(f"memory: {path.name}: {odd} is missing or does not fit the others; take another copy")
    try:
        check_finite("vectors", tensors["vectors"])
    except NonFinite as error:
        raise Damaged(f"memory: {path.name}: {error}; compress again") from None
    return tensors, about


def misfit(tensors: Mapping[str, Tensor], about: Provenance) -> str | None:
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
    rows, lengths = len(about.documents), offsets.diff()
    if vectors.shape[1] != about.width or vectors.dtype.itemsize == 1:
        return "vectors"
    if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != len(vectors) or bool((lengths < 0).any()):
        return "offsets"
    read = torch.tensor([sum(sum(each.segments) for each in row) for row in about.documents], dtype=torch.long)
    if spans.shape[0] != rows or bool((spans < 0).any()) or not torch.equal(spans.sum(1), read):
        return "spans"
    row = torch.arange(rows).repeat_interleave(lengths)
    rising = block.diff() >= 0
    sound = len(block) == len(vectors) and bool(((block >= 0) & (block < spans.shape[1])).all())
    return None if sound and bool((rising | (row.diff() > 0)).all()) else "block"
