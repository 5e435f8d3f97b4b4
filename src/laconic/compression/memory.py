"""A memory as a value: the vectors that stand for a text that was read, of which segment each is, and which are read.

Memory of AutoCompressors (arXiv:2305.14788, accumulated) and RMT (arXiv:2207.06881, replaced); rows are documents.
Every operation gives a new value and leaves the old one as it was; gradients flow through all of them.

Symbols: M slots held, live or not; N segments, whose vectors are a block; s survival of a slot, 1 where hard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from laconic.compression import slots
from laconic.compression.memory_file import MemoryMetadata, load_memory, save_memory
from laconic.errors import CorruptArtifactError, UsageError


@dataclass(frozen=True)
class SummaryMemory:
    """What was kept of B texts: vectors in document order, the oldest first; build it by `empty` and `append`.

    `live` is the only truth about length; a slot that is not live is zero and read by nothing. `block` is the number
    of the segment that wrote a slot, -1 where dead. `log_s` is there while lengths are soft, in training; None is
    hard. `spans` are the tokens of each segment, 0 where a document had ended. `provenance` says who may read it.
    """

    vectors: Float[Tensor, "B M D"]
    valid: Bool[Tensor, "B M"]
    segment_ids: Int[Tensor, "B M"]
    log_s: Float32[Tensor, "B M"] | None
    segment_tokens: Int[Tensor, "B N"]
    metadata: MemoryMetadata | None = None

    @classmethod
    def empty(
        cls, B: int, D: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> "SummaryMemory":
        """Nothing kept: no slot and no segment."""
        none = torch.empty(B, 0, dtype=torch.long, device=device)
        return cls(torch.empty(B, 0, D, dtype=dtype, device=device), none.bool(), none, None, none)

    @property
    def B(self) -> int:
        """Rows."""
        return self.vectors.shape[0]

    @property
    def M(self) -> int:
        """Slots held, live or not."""
        return self.vectors.shape[1]

    @property
    def D(self) -> int:
        """Width of a vector."""
        return self.vectors.shape[2]

    @property
    def num_segments(self) -> int:
        """Segments, N."""
        return self.segment_tokens.shape[1]

    @property
    def num_tokens(self) -> Int[Tensor, " B"]:
        """Tokens of text that each row stands for."""
        return self.segment_tokens.sum(1)

    @property
    def num_vectors(self) -> Int[Tensor, " B"]:
        """Live vectors of each row."""
        return self.valid.sum(1)

    @property
    def vectors_per_segment(self) -> Int[Tensor, "B N"]:
        """Live vectors of each segment."""
        return slots.count_per_segment(self.segment_ids, self.num_segments)

    @property
    def ranks_in_segment(self) -> Int[Tensor, "B M"]:
        """The place of a live slot in its block, from 0; -1 where dead."""
        return slots.rank_in_segment(self.valid, self.segment_ids, self.num_segments)

    @property
    def num_bytes(self) -> int:
        """Bytes of the live vectors, as a file holds them."""
        return int(self.valid.sum()) * self.D * self.vectors.element_size()

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in found.items() if isinstance(x, Tensor)}

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "SummaryMemory":
        """`function` of every tensor."""
        return replace(self, **{name: function(x) for name, x in self.tensors().items()})

    def detach(self) -> "SummaryMemory":
        """Eq. AC6: the same numbers, cut from the graph."""
        return self.map_tensors(lambda x: x.detach())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "SummaryMemory":
        """Elsewhere, or with vectors of another type; `log_s` stays float32."""
        moved = self.map_tensors(lambda x: x.to(device))
        return replace(moved, vectors=moved.vectors.to(dtype))

    def is_equal(self, other: "SummaryMemory") -> bool:
        """Whether every tensor is bit-equal, and the provenance."""
        mine, theirs = self.tensors(), other.tensors()
        same = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        return same and self.metadata == other.metadata

    def append(
        self,
        vectors: Float[Tensor, "B n D"],
        valid: Bool[Tensor, "B n"],
        num_tokens: Int[Tensor, " B"],
        log_s: Float32[Tensor, "B n"] | None = None,
    ) -> "SummaryMemory":
        """Eq. AC3: M_i = [M_{i-1}; sigma^i], one more block, written for a segment of so many `tokens` in each row.

        Where either is soft, what is hard has survival 1. Provenance stays as it is.
        """
        block = torch.full_like(valid, self.num_segments, dtype=torch.long).masked_fill(~valid, -1)
        old, new = self.log_s, log_s
        if old is not None or new is not None:
            old = torch.zeros_like(self.valid, dtype=torch.float32) if old is None else old
            new = torch.zeros_like(valid, dtype=torch.float32) if new is None else new.masked_fill(~valid, 0.0)
        return SummaryMemory(
            torch.cat([self.vectors, vectors.masked_fill(~valid[..., None], 0.0).to(self.vectors.dtype)], 1),
            torch.cat([self.valid, valid], 1),
            torch.cat([self.segment_ids, block], 1),
            None if old is None or new is None else torch.cat([old, new], 1),
            torch.cat([self.segment_tokens, num_tokens[:, None]], 1),
            self.metadata,
        )

    def overwrite(
        self,
        vectors: Float[Tensor, "B n D"],
        valid: Bool[Tensor, "B n"],
        num_tokens: Int[Tensor, " B"],
        log_s: Float32[Tensor, "B n"] | None = None,
    ) -> "SummaryMemory":
        """Eq. AC4: M_i = sigma^i; a row whose document has ended, so that `tokens` is 0, keeps what it had."""
        grown, ended = self.append(vectors, valid, num_tokens, log_s), num_tokens == 0
        if not bool(ended.any()):
            return grown.select_columns(slice(self.M, None))
        old = torch.arange(grown.M, device=valid.device) < self.M
        return grown.mask_slots(torch.where(old, ended[:, None], ~ended[:, None])).compact()

    def overwrite_rows(
        self,
        vectors: Float[Tensor, "B n D"],
        valid: Bool[Tensor, "B n"],
        rows: Bool[Tensor, " B"],
        log_s: Float32[Tensor, "B n"] | None = None,
    ) -> "SummaryMemory":
        """Eq. VL27: in the `rows` marked, these vectors take the place of all slots, as the last segment's block."""
        before = replace(self, segment_tokens=self.segment_tokens[:, : self.num_segments - 1])
        return replace(before.overwrite(vectors, valid, rows.long(), log_s), segment_tokens=self.segment_tokens)

    def select_columns(self, columns: slice) -> "SummaryMemory":
        """Some of the columns of slots, with all segments."""
        cut = {name: x if name == "spans" else x[:, columns] for name, x in self.tensors().items()}
        return replace(self, **cut)

    def mask_slots(self, keep_mask: Bool[Tensor, "B M"]) -> "SummaryMemory":
        """The same slots, of which those that are not `kept` are dead."""
        live = self.valid & keep_mask
        log_s = None if self.log_s is None else self.log_s.masked_fill(~live, 0.0)
        vectors, block = self.vectors.masked_fill(~live[..., None], 0.0), self.segment_ids.masked_fill(~live, -1)
        return replace(self, vectors=vectors, valid=live, segment_ids=block, log_s=log_s)

    def select_rows(self, rows: Sequence[int] | Int[Tensor, " R"]) -> "SummaryMemory":
        """The rows chosen; repeats are allowed. Raises `Usage` (2) for a row that is not there."""
        at = torch.as_tensor(rows, dtype=torch.long, device=self.valid.device)
        bad = at[(at < 0) | (at >= self.B)]
        if len(bad):
            raise UsageError(f"take: memory has {self.B} rows, asked was row {int(bad[0])}; rows count from 0")
        taken = self.map_tensors(lambda x: x.index_select(0, at))
        about = self.metadata
        return taken if about is None else replace(taken, metadata=about.select_rows([int(row) for row in at]))

    def slice_segments(self, start: int, stop: int) -> "SummaryMemory":
        """The blocks `start` to `stop`, exclusive, numbered anew. Raises `Usage` (2) beyond the last, or of a whole."""
        if not 0 <= start <= stop <= self.num_segments:
            raise UsageError(f"slice({start}, {stop}): memory has {self.num_segments} blocks, counted from 0")
        if self.metadata is not None and self.metadata.is_overwriting and stop - start < self.num_segments:
            raise UsageError(
                f"slice({start}, {stop}): the last block of this memory took the others' place; take it whole"
            )
        kept = self.mask_slots((self.segment_ids >= start) & (self.segment_ids < stop))
        moved = (kept.segment_ids - start).masked_fill(~kept.valid, -1)
        about = None if self.metadata is None else self.metadata.slice_segments(start, stop)
        return replace(
            kept, segment_ids=moved, segment_tokens=self.segment_tokens[:, start:stop], metadata=about
        ).compact()

    @staticmethod
    def concat_segments(*memories: "SummaryMemory") -> "SummaryMemory":
        """Memories side by side, left to right the oldest first; blocks are numbered anew.

        Raises `Usage` (2) for other rows, widths or soft beside hard, `Damaged` (76) where one is of another model.
        """
        first = check_compatible("join", memories)
        odd = next((each.B for each in memories if each.B != first.B), None)
        if odd is not None:
            raise UsageError(f"join: a memory of {odd} rows to one of {first.B}; take the rows that belong together")
        starts = [sum(each.num_segments for each in memories[:i]) for i in range(len(memories))]
        moved = [
            replace(each, segment_ids=(each.segment_ids + start).masked_fill(~each.valid, -1))
            for each, start in zip(memories, starts, strict=True)
        ]
        found = {name: torch.cat([each.tensors()[name] for each in moved], 1) for name in first.tensors()}
        known = [each.metadata for each in memories if each.metadata is not None]
        about = MemoryMetadata.concat_segments(known, starts) if known else None
        return replace(first, **found, metadata=about).compact()

    @staticmethod
    def concat_rows(*memories: "SummaryMemory") -> "SummaryMemory":
        """The rows of all, as one batch. Raises as `join` does."""
        first = check_compatible("stack", memories)
        M, N = max(each.M for each in memories), max(each.num_segments for each in memories)

        def padded(each: SummaryMemory, name: str) -> Tensor:
            x, n = each.tensors()[name], N - each.num_segments if name == "spans" else M - each.M
            return F.pad(x, (0, 0, 0, n) if x.ndim == 3 else (0, n), value=-1 if name == "block" else 0)

        found = {name: torch.cat([padded(each, name) for each in memories], 0) for name in first.tensors()}
        known = [each.metadata for each in memories if each.metadata is not None]
        about = MemoryMetadata.concat_rows(known) if known else None
        return replace(first, **found, metadata=about)

    def truncate_segments(self, n: int) -> "SummaryMemory":
        """The first `n` vectors of every block; of what is pooled or selected these are no shorter memory: `Usage`."""
        generator = "parallel" if self.metadata is None else self.metadata.generator
        if generator in ("pool", "select"):
            raise UsageError(
                f"crop({n}): vectors of generator {generator} stand each for a part of the text; compress with --vectors {n}"
            )
        if n < 0:
            raise UsageError(f"crop({n}): give 0 or more")
        return self.mask_slots(self.ranks_in_segment < n).compact()

    def keep_top_vectors(self, budget: int) -> "SummaryMemory":
        """Eq. VL18: of each row the `budget` slots of largest s; ties to the earlier in its block, then in the text."""
        if budget < 0:
            raise UsageError(f"fit({budget}): give 0 or more")
        log_s = torch.zeros_like(self.valid, dtype=torch.float32) if self.log_s is None else self.log_s
        return self.mask_slots(slots.top_budget_mask(log_s, self.valid, self.ranks_in_segment, budget)).compact()

    def truncate_to(self, lengths: Int[Tensor, "B N"]) -> "SummaryMemory":
        """Of each block the first `lengths`, and no survival any more."""
        allowed = F.pad(lengths, (0, 1)).gather(1, self.segment_ids % (self.num_segments + 1))
        return replace(self.mask_slots(self.ranks_in_segment < allowed), log_s=None).compact()

    def compact(self) -> "SummaryMemory":
        """The live slots of each row side by side from the left; what is dead in all rows is gone."""
        if bool(self.valid.all()):
            return self
        order = slots.valid_first_order(self.valid)[:, : int(self.num_vectors.max()) if self.B else 0]
        wide = order[..., None].expand(-1, -1, self.D)
        moved = {
            name: x if name == "spans" else x.gather(1, wide if x.ndim == 3 else order)
            for name, x in self.tensors().items()
        }
        return replace(self, **moved)

    def to_list(self) -> list[Float[Tensor, "N D"]]:
        """The live vectors of each row."""
        return [vectors[live] for vectors, live in zip(self.vectors, self.valid, strict=True)]

    def to_ragged(self) -> tuple[Float[Tensor, "N D"], Int[Tensor, " rows"]]:
        """All live vectors, row after row, and where each row begins; the last offset is their number."""
        return self.vectors[self.valid], F.pad(self.num_vectors.cumsum(0), (1, 0))

    @classmethod
    def from_ragged(
        cls,
        vectors: Float[Tensor, "all D"],
        offsets: Int[Tensor, " rows"],
        segment_ids: Int[Tensor, " all"],
        segment_tokens: Int[Tensor, "B N"],
        metadata: MemoryMetadata | None = None,
    ) -> "SummaryMemory":
        """What `flat` and the live entries of `block` were made of, packed."""
        lengths, D = offsets.diff(), vectors.shape[1]
        M = int(lengths.max()) if len(lengths) else 0
        live = torch.arange(M, device=vectors.device) < lengths[:, None]
        made = vectors.new_zeros(len(lengths), M, D).masked_scatter(live[..., None], vectors)
        return cls(
            made,
            live,
            segment_ids.new_full(live.shape, -1).masked_scatter(live, segment_ids),
            None,
            segment_tokens,
            metadata,
        )

    def save(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """One safetensors file of the live vectors, in their own type or in `dtype`, that only its model may read.

        Raises `Usage` (2) for a soft memory and for one without provenance, `NonFinite` (65), `NoSpace` (74).
        """
        if self.log_s is not None:
            raise UsageError(f"{path}: a soft memory has no lengths to write; harden it first")
        if self.metadata is None:
            raise UsageError(
                f"{path}: this memory has no provenance, so nobody could know who may read it; give it one"
            )
        vectors, offsets = self.to_ragged()
        vectors = vectors.to(dtype)
        about = replace(self.metadata, dtype=str(vectors.dtype).removeprefix("torch."))
        tensors = {
            "vectors": vectors,
            "offsets": offsets,
            "block": self.segment_ids[self.valid],
            "spans": self.segment_tokens,
        }
        save_memory(Path(path), tensors, about)

    @classmethod
    def load(cls, path: str | Path, reader: MemoryMetadata | None = None) -> "SummaryMemory":
        """What `save` wrote, on the CPU, in the type it has there; `ours` is what the reader at hand would write.

        Raises `Damaged` (76) for a file that was changed, is newer, or was written for another reader.
        """
        tensors, about = load_memory(Path(path))
        if reader is not None:
            about.check_reader(Path(path).name, reader)
        return cls.from_ragged(tensors["vectors"], tensors["offsets"], tensors["block"], tensors["spans"], about)


def check_compatible(operation: str, memories: Sequence[SummaryMemory]) -> SummaryMemory:
    """The first of memories that can stand together."""
    if not memories:
        raise UsageError(f"{operation}: no memory is given")
    first = memories[0]
    for each in memories[1:]:
        if each.D != first.D:
            raise UsageError(
                f"{operation}: vectors of width {each.D} to vectors of {first.D}; take memories of one model"
            )
        if (each.log_s is None) != (first.log_s is None):
            raise UsageError(f"{operation}: a soft memory with a hard one; harden it first")
        if each.metadata is None or first.metadata is None:
            if each.metadata is not first.metadata:
                raise CorruptArtifactError(f"{operation}: one memory has no provenance; give it the other's knowingly")
        else:
            each.metadata.check_joinable(operation, first.metadata)
    return first
