"""Immutable batch of summary vectors, with segment ids and a validity mask.

The memory of AutoCompressors (arXiv:2305.14788, accumulated) and RMT (arXiv:2207.06881, overwritten). Rows are
documents. Every operation returns a new value and leaves the old one unchanged; gradients flow through all of them.

Symbols: M slots, valid or not; N segments; s the survival of a slot, 1 where lengths are hard.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from laconic.compression.memory_file import FILE_KIND, MemoryMetadata
from laconic.compression.saved_memory import SavedMemory, Target, check_size, list_rows, resolve_target
from laconic.errors import UsageError
from laconic.models.cache import RowIndex


@dataclass(frozen=True, eq=False)
class SummaryMemory(SavedMemory[MemoryMetadata]):
    """Summary vectors of B texts in document order, oldest first. Build one with `empty` and `append`.

    Attributes:
        vectors: The summary vectors; zero where a slot is not valid.
        valid: Which slots are read. The number of vectors follows from this mask alone.
        segment_ids: The segment that wrote each slot, -1 where it is not valid.
        log_s: Log survival of each slot while lengths are soft, in training; None if they are hard.
        segment_tokens: Number of text tokens in each segment, 0 where a document had ended.
        metadata: Which weights wrote the memory and may read it; required to save it.

    Examples:
        >>> import torch, laconic
        >>> memory = laconic.SummaryMemory.empty(B=1, D=4)
        >>> memory.append(torch.ones(1, 2, 4), torch.tensor([[True, True]]), torch.tensor([9]))
        SummaryMemory([9] tokens in [2] vectors of width 4)
    """

    FILE_KIND: ClassVar = FILE_KIND
    METADATA_TYPE: ClassVar = MemoryMetadata
    UNIT: ClassVar = "vectors"

    vectors: Float[Tensor, "B M D"]
    valid: Bool[Tensor, "B M"]
    segment_ids: Int[Tensor, "B M"]
    log_s: Float32[Tensor, "B M"] | None
    segment_tokens: Int[Tensor, "B N"]
    metadata: MemoryMetadata | None = None

    def __repr__(self) -> str:
        tokens = list(map(int, self.num_tokens))
        vectors = list(map(int, self.num_vectors))
        return f"SummaryMemory({tokens} tokens in {vectors} vectors of width {self.D})"

    @classmethod
    def empty(
        cls, B: int, D: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> "SummaryMemory":
        """Create a memory of `B` rows of width `D` on a `device`, in a `dtype`, without slots or segments."""
        vectors = torch.empty(B, 0, D, dtype=dtype, device=device)
        ids = torch.empty(B, 0, dtype=torch.long, device=device)
        return cls(vectors, valid=ids.bool(), segment_ids=ids, log_s=None, segment_tokens=ids)

    @property
    def B(self) -> int:
        """Number of rows."""
        return self.vectors.shape[0]

    @property
    def M(self) -> int:
        """Number of slots, valid or not."""
        return self.vectors.shape[1]

    @property
    def D(self) -> int:
        """Width of a vector."""
        return self.vectors.shape[2]

    @property
    def num_segments(self) -> int:
        """Number of segments, N."""
        return self.segment_tokens.shape[1]

    @property
    def num_tokens(self) -> Int[Tensor, " B"]:
        """Number of text tokens compressed in each row."""
        return self.segment_tokens.sum(1)

    @property
    def num_vectors(self) -> Int[Tensor, " B"]:
        """Number of valid vectors in each row."""
        return self.valid.sum(1)

    @property
    def sizes(self) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
        return self.num_tokens, self.num_vectors

    @property
    def shape_text(self) -> str:
        return f"{'hard' if self.log_s is None else 'soft'} vectors of width {self.D}"

    @property
    def vectors_per_segment(self) -> Int[Tensor, "B N"]:
        """Number of valid vectors of each segment."""
        N, ids = self.num_segments, self.segment_ids
        counts = torch.zeros(self.B, N + 1, dtype=torch.long, device=ids.device)
        return counts.scatter_add(1, ids % (N + 1), torch.ones_like(ids))[:, :N]  # the last column counts id -1

    @property
    def ranks_in_segment(self) -> Int[Tensor, "B M"]:
        """Position of each valid slot within its segment, from 0; -1 where a slot is not valid."""
        lengths = self.vectors_per_segment
        start = F.pad(lengths.cumsum(1) - lengths, (0, 1)).gather(1, self.segment_ids % (self.num_segments + 1))
        return (self.valid.cumsum(1) - 1 - start).masked_fill(~self.valid, -1)

    @property
    def num_bytes(self) -> int:
        """Size of the valid vectors in bytes, as stored in a file."""
        return int(self.valid.sum()) * self.D * self.vectors.element_size()

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its field name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in values.items() if isinstance(x, Tensor)}

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "SummaryMemory":
        """Apply `function` to every tensor."""
        return replace(self, **{name: function(x) for name, x in self.tensors().items()})

    def detach(self) -> "SummaryMemory":
        """Eq. AC6: the same values, detached from the autograd graph."""
        return self.map_tensors(lambda x: x.detach())

    def to(self, device: Target | None = None, dtype: torch.dtype | None = None) -> "SummaryMemory":
        """Move to a device and convert the vectors to a dtype; one argument may be either. `log_s` stays float32.

        Raises:
            UsageError: If torch cannot use the device, or the dtype is not a floating-point one.
        """
        device, dtype = resolve_target(device, dtype)
        moved = self.map_tensors(lambda x: x.to(device))
        return replace(moved, vectors=moved.vectors.to(dtype))

    def append(
        self,
        vectors: Float[Tensor, "B n D"],
        valid: Bool[Tensor, "B n"],
        num_tokens: Int[Tensor, " B"],
        log_s: Float32[Tensor, "B n"] | None = None,
    ) -> "SummaryMemory":
        """Eq. AC3: M_i = [M_{i-1}; sigma^i], one more segment.

        Args:
            vectors: sigma^i, the vectors of the segment.
            valid: Which of them are kept.
            num_tokens: Tokens of the segment's text in each row.
            log_s: Log survival of the vectors. If either the memory or the new vectors are soft, the others get 0.
        """
        new_ids = torch.full_like(valid, self.num_segments, dtype=torch.long).masked_fill(~valid, -1)
        joined_log_s = None
        if self.log_s is not None or log_s is not None:
            old = torch.zeros_like(self.valid, dtype=torch.float32) if self.log_s is None else self.log_s
            new = torch.zeros_like(valid, dtype=torch.float32) if log_s is None else log_s.masked_fill(~valid, 0.0)
            joined_log_s = torch.cat([old, new], 1)
        return SummaryMemory(
            vectors=torch.cat([self.vectors, vectors.masked_fill(~valid[..., None], 0.0).to(self.vectors.dtype)], 1),
            valid=torch.cat([self.valid, valid], 1),
            segment_ids=torch.cat([self.segment_ids, new_ids], 1),
            log_s=joined_log_s,
            segment_tokens=torch.cat([self.segment_tokens, num_tokens[:, None]], 1),
            metadata=self.metadata,
        )

    def overwrite(
        self,
        vectors: Float[Tensor, "B n D"],
        valid: Bool[Tensor, "B n"],
        num_tokens: Int[Tensor, " B"],
        log_s: Float32[Tensor, "B n"] | None = None,
    ) -> "SummaryMemory":
        """Eq. AC4: M_i = sigma^i; a row whose document has ended (`num_tokens` 0) keeps its old vectors.

        The other arguments are those of `append`.
        """
        grown = self.append(vectors, valid, num_tokens, log_s)
        is_old = torch.arange(grown.M, device=valid.device) < self.M
        has_ended = (num_tokens == 0)[:, None]
        return grown.mask_slots(torch.where(is_old, has_ended, ~has_ended)).compact()

    def overwrite_rows(
        self, vectors: Float[Tensor, "B n D"], valid: Bool[Tensor, "B n"], rows: Bool[Tensor, " B"]
    ) -> "SummaryMemory":
        """Eq. VL27: in the marked `rows`, replace all slots by the `valid` ones of `vectors`, of the last segment."""
        # `overwrite` adds a segment, so the last one is removed first. It keeps the vectors of rows with 0 tokens, here
        # those that are not marked; the true numbers are put back afterwards.
        before = replace(self, segment_tokens=self.segment_tokens[:, : self.num_segments - 1])
        return replace(before.overwrite(vectors, valid, rows.long()), segment_tokens=self.segment_tokens)

    def mask_slots(self, keep_mask: Bool[Tensor, "B M"]) -> "SummaryMemory":
        """Invalidate the slots that `keep_mask` does not mark."""
        valid = self.valid & keep_mask
        log_s = None if self.log_s is None else self.log_s.masked_fill(~valid, 0.0)
        vectors = self.vectors.masked_fill(~valid[..., None], 0.0)
        segment_ids = self.segment_ids.masked_fill(~valid, -1)
        return replace(self, vectors=vectors, valid=valid, segment_ids=segment_ids, log_s=log_s)

    def select_rows(self, rows: RowIndex) -> "SummaryMemory":
        """Select rows by index or by a boolean mask; an index may repeat.

        Raises:
            UsageError: If there is no index, or one is not an integer or is out of range.
        """
        rows = list_rows(rows, self.B)
        index = torch.tensor(rows, device=self.valid.device)
        metadata = None if self.metadata is None else self.metadata.select_rows(rows)
        return replace(self.map_tensors(lambda x: x.index_select(0, index)), metadata=metadata)

    def slice_segments(self, start: int, stop: int) -> "SummaryMemory":
        """Select the segments from `start` to `stop` (exclusive) and renumber them from 0.

        Raises:
            UsageError: If the range is invalid, or if segments of this memory overwrite older ones.
        """
        if not 0 <= start <= stop <= self.num_segments:
            raise UsageError(f"segments {start} to {stop} are out of range; the memory has {self.num_segments}")
        if self.metadata is not None and self.metadata.is_overwriting and stop - start < self.num_segments:
            raise UsageError(f"segments {start} to {stop} cannot be separated, since each overwrites earlier ones")
        selected = self.mask_slots((self.segment_ids >= start) & (self.segment_ids < stop))
        segment_ids = (selected.segment_ids - start).masked_fill(~selected.valid, -1)
        metadata = None if self.metadata is None else self.metadata.slice_segments(start, stop)
        segment_tokens = self.segment_tokens[:, start:stop]
        return replace(selected, segment_ids=segment_ids, segment_tokens=segment_tokens, metadata=metadata).compact()

    @staticmethod
    def concat_segments(*memories: "SummaryMemory") -> "SummaryMemory":
        """Concatenate memories of the same rows along the slots, oldest first, and renumber their segments.

        Raises:
            UsageError: If numbers of rows or widths differ, or if only some memories are soft.
            CorruptArtifactError: If the memories were written by different models.
        """
        first = SummaryMemory.check_joinable("concat_segments", memories, equal_rows=True)
        starts = [sum(memory.num_segments for memory in memories[:i]) for i in range(len(memories))]
        moved = [
            replace(memory, segment_ids=(memory.segment_ids + start).masked_fill(~memory.valid, -1))
            for memory, start in zip(memories, starts, strict=True)
        ]
        joined = {name: torch.cat([memory.tensors()[name] for memory in moved], 1) for name in first.tensors()}
        known = [memory.metadata for memory in memories if memory.metadata is not None]
        metadata = MemoryMetadata.concat_segments(known, starts) if known else None
        return replace(first, **joined, metadata=metadata).compact()

    @staticmethod
    def concat_rows(*memories: "SummaryMemory") -> "SummaryMemory":
        """Concatenate the rows of all memories into one batch. Raises like `concat_segments`."""
        first = SummaryMemory.check_joinable("concat_rows", memories, equal_rows=False)
        M = max(memory.M for memory in memories)
        N = max(memory.num_segments for memory in memories)

        def pad(memory: SummaryMemory, name: str) -> Tensor:
            n = N - memory.num_segments if name == "segment_tokens" else M - memory.M
            padding = (0, 0, 0, n) if name == "vectors" else (0, n)
            return F.pad(memory.tensors()[name], padding, value=-1 if name == "segment_ids" else 0)

        tensors = {name: torch.cat([pad(memory, name) for memory in memories], 0) for name in first.tensors()}
        known = [memory.metadata for memory in memories if memory.metadata is not None]
        metadata = MemoryMetadata.concat_rows(known) if known else None
        return replace(first, **tensors, metadata=metadata)

    def keep_top_vectors(self, budget: int) -> "SummaryMemory":
        """Eq. VL18: keep the `budget` slots with the largest s of each row; ties go to the smaller rank, then earlier.

        Raises:
            UsageError: If `budget` is not an integer of 0 or more.
        """
        check_size(budget, "vectors", 0)
        log_s = torch.zeros_like(self.valid, dtype=torch.float32) if self.log_s is None else self.log_s
        # two stable sorts: the second, by log s, keeps the order of the first, by rank, among equal ones
        by_rank = self.ranks_in_segment.masked_fill(~self.valid, self.M).argsort(dim=1, stable=True)
        weight = log_s.masked_fill(~self.valid, -torch.inf).gather(1, by_rank)
        top = by_rank.gather(1, weight.argsort(dim=1, descending=True, stable=True))[:, :budget]
        return self.mask_slots(torch.zeros_like(self.valid).scatter(1, top, True)).compact()

    def truncate_to(self, lengths: Int[Tensor, "B N"]) -> "SummaryMemory":
        """Keep the first `lengths` vectors of each segment and make the memory hard."""
        allowed = F.pad(lengths, (0, 1)).gather(1, self.segment_ids % (self.num_segments + 1))
        return replace(self.mask_slots(self.ranks_in_segment < allowed), log_s=None).compact()

    def compact(self) -> "SummaryMemory":
        """Move the valid slots of each row to the left and drop columns that no row uses."""
        if bool(self.valid.all()):
            return self
        num_slots = int(self.num_vectors.max()) if self.B else 0
        order = (~self.valid).long().argsort(dim=1, stable=True)[:, :num_slots]
        return replace(
            self,
            vectors=self.vectors.gather(1, order[..., None].expand(-1, -1, self.D)),
            valid=self.valid.gather(1, order),
            segment_ids=self.segment_ids.gather(1, order),
            log_s=None if self.log_s is None else self.log_s.gather(1, order),
        )

    def to_list(self) -> list[Float[Tensor, "N D"]]:
        """Return the valid vectors of each row."""
        return [vectors[valid] for vectors, valid in zip(self.vectors, self.valid, strict=True)]

    def to_ragged(self) -> tuple[Float[Tensor, "N D"], Int[Tensor, " rows"]]:
        """Return all valid vectors, row after row, and the offset of each row; the last offset is their number."""
        return self.vectors[self.valid], F.pad(self.num_vectors.cumsum(0), (1, 0))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: MemoryMetadata | None) -> "SummaryMemory":
        """Build a compact memory with `metadata` from the `tensors` of a file.

        These are vectors and offsets, as `to_ragged` returns them, segment ids of the vectors, and segment tokens.
        """
        vectors, segment_ids = tensors["vectors"], tensors["segment_ids"]
        lengths = tensors["offsets"].diff()
        M = int(lengths.max()) if len(lengths) else 0
        valid = torch.arange(M, device=vectors.device) < lengths[:, None]
        padded = vectors.new_zeros(*valid.shape, vectors.shape[1]).masked_scatter(valid[..., None], vectors)
        padded_ids = segment_ids.new_full(valid.shape, -1).masked_scatter(valid, segment_ids)
        return cls(padded, valid, padded_ids, None, tensors["segment_tokens"], metadata)

    def save(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """Save valid vectors (in `dtype` or their own) and metadata to one safetensors file; an old one is replaced.

        Raises:
            UsageError: If the memory is soft or has no metadata, `path` is a folder, or `dtype` is not a floating one.
            NonFiniteError: If a vector is not finite.
            DiskError: If there is not enough space.
        """
        if self.log_s is not None:
            raise UsageError(f"{path}: a soft memory has no lengths to save; call truncate_to first")
        vectors, offsets = (self if dtype is None else self.to(dtype)).to_ragged()
        tensors = {
            "vectors": vectors,
            "offsets": offsets,
            "segment_ids": self.segment_ids[self.valid],
            "segment_tokens": self.segment_tokens,
        }
        self.write(path, tensors, vectors.dtype)
