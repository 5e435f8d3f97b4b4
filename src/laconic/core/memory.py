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

from laconic.core import slots
from laconic.core.errors import Damaged, Usage
from laconic.core.provenance import Provenance, stored, written


@dataclass(frozen=True)
class Memory:
    """What was kept of B texts: vectors in document order, the oldest first; build it by `empty` and `append`.

    `live` is the only truth about length; a slot that is not live is zero and read by nothing. `block` is the number
    of the segment that wrote a slot, -1 where dead. `log_s` is there while lengths are soft, in training; None is
    hard. `spans` are the tokens of each segment, 0 where a document had ended. `provenance` says who may read it.
    """

    vectors: Float[Tensor, "B M D"]
    live: Bool[Tensor, "B M"]
    block: Int[Tensor, "B M"]
    log_s: Float32[Tensor, "B M"] | None
    spans: Int[Tensor, "B N"]
    provenance: Provenance | None = None

    @classmethod
    def empty(
        cls, B: int, D: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> "Memory":
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
    def blocks(self) -> int:
        """Segments, N."""
        return self.spans.shape[1]

    @property
    def tokens(self) -> Int[Tensor, " B"]:
        """Tokens of text that each row stands for."""
        return self.spans.sum(1)

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Live vectors of each row."""
        return self.live.sum(1)

    @property
    def block_lengths(self) -> Int[Tensor, "B N"]:
        """Live vectors of each segment."""
        return slots.counted(self.block, self.blocks)

    @property
    def ranks(self) -> Int[Tensor, "B M"]:
        """The place of a live slot in its block, from 0; -1 where dead."""
        return slots.ranks(self.live, self.block, self.blocks)

    @property
    def bytes(self) -> int:
        """Bytes of the live vectors, as a file holds them."""
        return int(self.live.sum()) * self.D * self.vectors.element_size()

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: x for name, x in found.items() if isinstance(x, Tensor)}

    def map(self, function: Callable[[Tensor], Tensor]) -> "Memory":
        """`function` of every tensor."""
        return replace(self, **{name: function(x) for name, x in self.tensors().items()})

    def detach(self) -> "Memory":
        """Eq. AC6: the same numbers, cut from the graph."""
        return self.map(lambda x: x.detach())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "Memory":
        """Elsewhere, or with vectors of another type; `log_s` stays float32."""
        moved = self.map(lambda x: x.to(device))
        return replace(moved, vectors=moved.vectors.to(dtype))

    def equal(self, other: "Memory") -> bool:
        """Whether every tensor is bit-equal, and the provenance."""
        mine, theirs = self.tensors(), other.tensors()
        same = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        return same and self.provenance == other.provenance

    def append(
        self,
        vectors: Float[Tensor, "B n D"],
        live: Bool[Tensor, "B n"],
        tokens: Int[Tensor, " B"],
        log_s: Float32[Tensor, "B n"] | None = None,
    ) -> "Memory":
        """Eq. AC3: M_i = [M_{i-1}; sigma^i], one more block, written for a segment of so many `tokens` in each row.

        Where either is soft, what is hard has survival 1. Provenance stays as it is.
        """
        block = torch.full_like(live, self.blocks, dtype=torch.long).masked_fill(~live, -1)
        old, new = self.log_s, log_s
        if old is not None or new is not None:
            old = torch.zeros_like(self.live, dtype=torch.float32) if old is None else old
            new = torch.zeros_like(live, dtype=torch.float32) if new is None else new.masked_fill(~live, 0.0)
        return Memory(
            torch.cat([self.vectors, vectors.masked_fill(~live[..., None], 0.0).to(self.vectors.dtype)], 1),
            torch.cat([self.live, live], 1),
            torch.cat([self.block, block], 1),
            None if old is None or new is None else torch.cat([old, new], 1),
            torch.cat([self.spans, tokens[:, None]], 1),
            self.provenance,
        )

    def replaced(
        self,
        vectors: Float[Tensor, "B n D"],
        live: Bool[Tensor, "B n"],
        tokens: Int[Tensor, " B"],
        log_s: Float32[Tensor, "B n"] | None = None,
    ) -> "Memory":
        """Eq. AC4: M_i = sigma^i; a row whose document has ended, so that `tokens` is 0, keeps what it had."""
        grown, ended = self.append(vectors, live, tokens, log_s), tokens == 0
        if not bool(ended.any()):
            return grown.columns(slice(self.M, None))
        old = torch.arange(grown.M, device=live.device) < self.M
        return grown.only(torch.where(old, ended[:, None], ~ended[:, None])).pack()

    def condensed(
        self,
        vectors: Float[Tensor, "B n D"],
        live: Bool[Tensor, "B n"],
        rows: Bool[Tensor, " B"],
        log_s: Float32[Tensor, "B n"] | None = None,
    ) -> "Memory":
        """Eq. VL27: in the `rows` marked, these vectors take the place of all slots, as the last segment's block."""
        before = replace(self, spans=self.spans[:, : self.blocks - 1])
        return replace(before.replaced(vectors, live, rows.long(), log_s), spans=self.spans)

    def columns(self, which: slice) -> "Memory":
        """Some of the columns of slots, with all segments."""
        cut = {name: x if name == "spans" else x[:, which] for name, x in self.tensors().items()}
        return replace(self, **cut)

    def only(self, kept: Bool[Tensor, "B M"]) -> "Memory":
        """The same slots, of which those that are not `kept` are dead."""
        live = self.live & kept
        log_s = None if self.log_s is None else self.log_s.masked_fill(~live, 0.0)
        vectors, block = self.vectors.masked_fill(~live[..., None], 0.0), self.block.masked_fill(~live, -1)
        return replace(self, vectors=vectors, live=live, block=block, log_s=log_s)

    def take(self, rows: Sequence[int] | Int[Tensor, " R"]) -> "Memory":
        """The rows chosen; repeats are allowed. Raises `Usage` (2) for a row that is not there."""
        at = torch.as_tensor(rows, dtype=torch.long, device=self.live.device)
        bad = at[(at < 0) | (at >= self.B)]
        if len(bad):
            raise Usage(f"take: memory has {self.B} rows, asked was row {int(bad[0])}; rows count from 0")
        taken = self.map(lambda x: x.index_select(0, at))
        about = self.provenance
        return taken if about is None else replace(taken, provenance=about.take([int(row) for row in at]))

    def slice(self, start: int, stop: int) -> "Memory":
        """The blocks `start` to `stop`, exclusive, numbered anew. Raises `Usage` (2) beyond the last, or of a whole."""
        if not 0 <= start <= stop <= self.blocks:
            raise Usage(f"slice({start}, {stop}): memory has {self.blocks} blocks, counted from 0")
        if self.provenance is not None and self.provenance.whole and stop - start < self.blocks:
            raise Usage(f"slice({start}, {stop}): the last block of this memory took the others' place; take it whole")
        kept = self.only((self.block >= start) & (self.block < stop))
        moved = (kept.block - start).masked_fill(~kept.live, -1)
        about = None if self.provenance is None else self.provenance.slice(start, stop)
        return replace(kept, block=moved, spans=self.spans[:, start:stop], provenance=about).pack()

    @staticmethod
    def join(*memories: "Memory") -> "Memory":
        """Memories side by side, left to right the oldest first; blocks are numbered anew.

        Raises `Usage` (2) for other rows, widths or soft beside hard, `Damaged` (76) where one is of another model.
        """
        first = alike("join", memories)
        odd = next((each.B for each in memories if each.B != first.B), None)
        if odd is not None:
            raise Usage(f"join: a memory of {odd} rows to one of {first.B}; take the rows that belong together")
        starts = [sum(each.blocks for each in memories[:i]) for i in range(len(memories))]
        moved = [
            replace(each, block=(each.block + start).masked_fill(~each.live, -1))
            for each, start in zip(memories, starts, strict=True)
        ]
        found = {name: torch.cat([each.tensors()[name] for each in moved], 1) for name in first.tensors()}
        known = [each.provenance for each in memories if each.provenance is not None]
        about = Provenance.join(known, starts) if known else None
        return replace(first, **found, provenance=about).pack()

    @staticmethod
    def stack(*memories: "Memory") -> "Memory":
        """The rows of all, as one batch. Raises as `join` does."""
        first = alike("stack", memories)
        M, N = max(each.M for each in memories), max(each.blocks for each in memories)

        def padded(each: Memory, name: str) -> Tensor:
            x, n = each.tensors()[name], N - each.blocks if name == "spans" else M - each.M
            return F.pad(x, (0, 0, 0, n) if x.ndim == 3 else (0, n), value=-1 if name == "block" else 0)

        found = {name: torch.cat([padded(each, name) for each in memories], 0) for name in first.tensors()}
        known = [each.provenance for each in memories if each.provenance is not None]
        about = Provenance.stack(known) if known else None
        return replace(first, **found, provenance=about)

    def crop(self, n: int) -> "Memory":
        """The first `n` vectors of every block; of what is pooled or selected these are no shorter memory: `Usage`."""
        generator = "parallel" if self.provenance is None else self.provenance.generator
        if generator in ("pool", "select"):
            raise Usage(
                f"crop({n}): vectors of generator {generator} stand each for a part of the text; compress with --n {n}"
            )
        if n < 0:
            raise Usage(f"crop({n}): give 0 or more")
        return self.only(self.ranks < n).pack()

    def fit(self, budget: int) -> "Memory":
        """Eq. VL18: of each row the `budget` slots of largest s; ties to the earlier in its block, then in the text."""
        if budget < 0:
            raise Usage(f"fit({budget}): give 0 or more")
        log_s = torch.zeros_like(self.live, dtype=torch.float32) if self.log_s is None else self.log_s
        return self.only(slots.largest(log_s, self.live, self.ranks, budget)).pack()

    def harden(self, lengths: Int[Tensor, "B N"]) -> "Memory":
        """Of each block the first `lengths`, and no survival any more."""
        allowed = F.pad(lengths, (0, 1)).gather(1, self.block % (self.blocks + 1))
        return replace(self.only(self.ranks < allowed), log_s=None).pack()

    def pack(self) -> "Memory":
        """The live slots of each row side by side from the left; what is dead in all rows is gone."""
        if bool(self.live.all()):
            return self
        order = slots.order(self.live)[:, : int(self.lengths.max()) if self.B else 0]
        wide = order[..., None].expand(-1, -1, self.D)
        moved = {
            name: x if name == "spans" else x.gather(1, wide if x.ndim == 3 else order)
            for name, x in self.tensors().items()
        }
        return replace(self, **moved)

    def ragged(self) -> list[Float[Tensor, "N D"]]:
        """The live vectors of each row."""
        return [vectors[live] for vectors, live in zip(self.vectors, self.live, strict=True)]

    def flat(self) -> tuple[Float[Tensor, "N D"], Int[Tensor, " rows"]]:
        """All live vectors, row after row, and where each row begins; the last offset is their number."""
        return self.vectors[self.live], F.pad(self.lengths.cumsum(0), (1, 0))

    @classmethod
    def unflat(
        cls,
        vectors: Float[Tensor, "all D"],
        offsets: Int[Tensor, " rows"],
        block: Int[Tensor, " all"],
        spans: Int[Tensor, "B N"],
        provenance: Provenance | None = None,
    ) -> "Memory":
        """What `flat` and the live entries of `block` were made of, packed."""
        lengths, D = offsets.diff(), vectors.shape[1]
        M = int(lengths.max()) if len(lengths) else 0
        live = torch.arange(M, device=vectors.device) < lengths[:, None]
        made = vectors.new_zeros(len(lengths), M, D).masked_scatter(live[..., None], vectors)
        return cls(made, live, block.new_full(live.shape, -1).masked_scatter(live, block), None, spans, provenance)

    def save(self, path: str | Path, dtype: torch.dtype | None = None) -> None:
        """One safetensors file of the live vectors, in their own type or in `dtype`, that only its model may read.

        Raises `Usage` (2) for a soft memory and for one without provenance, `NonFinite` (65), `NoSpace` (74).
        """
        if self.log_s is not None:
            raise Usage(f"{path}: a soft memory has no lengths to write; harden it first")
        if self.provenance is None:
            raise Usage(f"{path}: this memory has no provenance, so nobody could know who may read it; give it one")
        vectors, offsets = self.flat()
        vectors = vectors.to(dtype)
        about = replace(self.provenance, dtype=str(vectors.dtype).removeprefix("torch."))
        tensors = {"vectors": vectors, "offsets": offsets, "block": self.block[self.live], "spans": self.spans}
        written(Path(path), tensors, about)

    @classmethod
    def load(cls, path: str | Path, ours: Provenance | None = None) -> "Memory":
        """What `save` wrote, on the CPU, in the type it has there; `ours` is what the reader at hand would write.

        Raises `Damaged` (76) for a file that was changed, is newer, or was written for another reader.
        """
        tensors, about = stored(Path(path))
        if ours is not None:
            about.check(Path(path).name, ours)
        return cls.unflat(tensors["vectors"], tensors["offsets"], tensors["block"], tensors["spans"], about)


def alike(what: str, memories: Sequence[Memory]) -> Memory:
    """The first of memories that can stand together."""
    if not memories:
        raise Usage(f"{what}: no memory is given")
    first = memories[0]
    for each in memories[1:]:
        if each.D != first.D:
            raise Usage(f"{what}: vectors of width {each.D} to vectors of {first.D}; take memories of one model")
        if (each.log_s is None) != (first.log_s is None):
            raise Usage(f"{what}: a soft memory with a hard one; harden it first")
        if each.provenance is None or first.provenance is None:
            if each.provenance is not first.provenance:
                raise Damaged(f"{what}: one memory has no provenance; give it the other's knowingly")
        else:
            each.provenance.check_same(what, first.provenance)
    return first
