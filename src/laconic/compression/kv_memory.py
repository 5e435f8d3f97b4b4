"""KV memory: the keys and values of a document that a model keeps, as an immutable value.

Each layer and KV head keeps its own positions, and perhaps its own number of them. Keys are stored as the decoder
rotated them, so that a memory continues as the document's KV cache does: new tokens follow at the position after the
document.

Shapes: L layers, B documents, G KV heads, M slots, E head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.compression.kv_memory_file import KVMemoryMetadata, load_kv_tensors, save_kv_tensors
from laconic.errors import UsageError
from laconic.models import rope
from laconic.models.cache import KVCache
from laconic.models.config import DecoderConfig
from laconic.models.rope_scaling import ROPE_SCALINGS

FIXED_FREQUENCIES = ("default", "linear", "llama3", "yarn")  # RoPE scalings that do not depend on the text's length


@dataclass(frozen=True)
class KVMemory:
    """Keys and values that stand in for the text of documents, one row per document.

    Args:
        keys: Per layer, rotated keys [B, G, M, E], in ascending order of their positions.
        values: Per layer, values [B, G, M, E].
        positions: Position of each slot [L, B, G, M].
        ranks: The slots with ranks below m are a memory of m slots per head [L, B, G, M], on average over all heads.
        valid: True at slots in use [L, B, G, M].
        num_tokens: Tokens read [B]; the next token has this position.
        metadata: The model that wrote the memory, the method, and the texts; None for a memory that is not saved.

    Example:
        >>> import torch, laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> cache = decoder(decoder.embed(torch.tensor([[1, 17, 42, 5]]))).cache
        >>> memory = laconic.KVMemory.from_cache(cache).keep_top_slots(2)
        >>> memory.M, memory.to_cache().S, memory.num_tokens.tolist()
        (2, 2, [4])
    """

    keys: tuple[Float[Tensor, "B G M E"], ...]
    values: tuple[Float[Tensor, "B G M E"], ...]
    positions: Int[Tensor, "L B G M"]
    ranks: Int[Tensor, "L B G M"]
    valid: Bool[Tensor, "L B G M"]
    num_tokens: Int[Tensor, " B"]
    metadata: KVMemoryMetadata | None = None

    def __repr__(self) -> str:
        shape = f"{len(self.keys)} layers, {self.keys[0].shape[1]} KV heads" if self.keys else "no layers"
        tokens, slots = list(map(int, self.num_tokens)), [round(float(n), 1) for n in self.num_slots]
        return f"KVMemory({tokens} tokens in {slots} slots per head, {shape})"

    @classmethod
    def from_cache(cls, cache: KVCache, metadata: KVMemoryMetadata | None = None) -> "KVMemory":
        """Return a memory of all slots of a cache; later slots count as more important."""
        L, G, _ = cache.shape_summary
        shape = (L, cache.B, G, cache.S)
        ranks = torch.arange(cache.S - 1, -1, -1, device=cache.valid.device).expand(shape)
        num_tokens = 1 + F.pad(cache.positions.masked_fill(~cache.valid, -1), (1, 0), value=-1).amax(1)
        positions = cache.positions[None, :, None].expand(shape)
        valid = cache.valid[None, :, None].expand(shape)
        if cache.head_valid:
            valid = valid & torch.stack(cache.head_valid)[..., 0]
        return cls(cache.keys, cache.values, positions, ranks, valid, num_tokens, metadata)

    @property
    def B(self) -> int:
        """Number of documents."""
        return self.num_tokens.shape[0]

    @property
    def M(self) -> int:
        """Largest number of slots of a head, or more."""
        return self.valid.shape[3]

    @property
    def num_slots(self) -> Float[Tensor, " B"]:
        """Slots in use per head, averaged over all heads and layers."""
        return self.valid.sum(3).double().mean((0, 2))

    @property
    def has_equal_heads(self) -> bool:
        """Whether all heads of a document use the same slots."""
        return bool((self.valid == self.valid[:1, :, :1]).all())

    @property
    def num_bytes(self) -> int:
        """Size of the slots in use: 2 E numbers of the keys' dtype and 8 bytes each."""
        numbers = 2 * self.keys[0].shape[3] * self.keys[0].element_size() if self.keys else 0
        return int(self.valid.sum()) * (numbers + 8)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name in a saved file."""
        keys = {f"keys.{i}": k for i, k in enumerate(self.keys)}
        values = {f"values.{i}": v for i, v in enumerate(self.values)}
        slots = {"positions": self.positions, "ranks": self.ranks, "valid": self.valid}
        return keys | values | slots | {"num_tokens": self.num_tokens}

    def map_slots(self, function: Callable[[Tensor, int], Tensor]) -> "KVMemory":
        """Apply `function` to every tensor that has slots, together with the index of its slot dimension."""
        return replace(
            self,
            keys=tuple(function(k, 2) for k in self.keys),
            values=tuple(function(v, 2) for v in self.values),
            positions=function(self.positions, 3),
            ranks=function(self.ranks, 3),
            valid=function(self.valid, 3),
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "KVMemory":
        """Move to a device, and convert keys and values to a dtype."""
        moved = replace(self.map_slots(lambda x, _: x.to(device)), num_tokens=self.num_tokens.to(device))
        return replace(
            moved, keys=tuple(k.to(dtype) for k in moved.keys), values=tuple(v.to(dtype) for v in moved.values)
        )

    def is_equal(self, other: "KVMemory") -> bool:
        """Test whether every tensor is equal bit for bit, and the metadata too."""
        mine, theirs = self.tensors(), other.tensors()
        same = mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        return same and self.metadata == other.metadata

    def to_cache(self) -> KVCache:
        """Return the KV cache that a decoder or `laconic.generate` continues from.

        A cache has one position per slot for all heads; these only determine where the next token stands. They are the
        largest of the heads, and `num_tokens` - 1 in the last slot of each row.
        """
        valid, slot = self.valid.any(2).any(0), torch.arange(self.M, device=self.valid.device)
        positions = self.positions.masked_fill(~self.valid, 0).amax((0, 2)).long()
        is_last = slot == (slot * valid).amax(1, keepdim=True)
        positions = torch.where(is_last, self.num_tokens[:, None] - 1, positions) * valid
        heads = () if self.has_equal_heads else tuple(self.valid[..., None])
        return KVCache(self.keys, self.values, positions, valid, heads)

    def keep_top_slots(self, num_slots: int) -> "KVMemory":
        """Keep the most important slots: `num_slots` per head, on average over heads if the ranks compare heads.

        Raises:
            UsageError: If `num_slots` is below 1.
        """
        if num_slots < 1:
            raise UsageError(f"cannot keep {num_slots} slots; give 1 or more")
        return replace(self, valid=self.valid & (self.ranks < num_slots)).compact()

    def compact(self) -> "KVMemory":
        """Move the slots in use of each head to the left, drop those that no head uses, and fill the others with 0."""
        M = int(self.valid.sum(3).max()) if self.valid.numel() else 0
        order = (~self.valid).long().argsort(dim=-1, stable=True)[..., :M]

        valid = self.valid.gather(3, order)

        def gather(x: Tensor, layer: int) -> Tensor:
            index = order[layer, ..., None].expand(-1, -1, -1, x.shape[3])
            return x.gather(2, index).masked_fill(~valid[layer, ..., None], 0.0)

        return replace(
            self,
            keys=tuple(gather(k, layer) for layer, k in enumerate(self.keys)),
            values=tuple(gather(v, layer) for layer, v in enumerate(self.values)),
            positions=self.positions.gather(3, order) * valid,
            ranks=self.ranks.gather(3, order) * valid,
            valid=valid,
        )

    def select_rows(self, rows: list[int]) -> "KVMemory":
        """Select documents by index; an index may repeat.

        Raises:
            UsageError: If an index is out of range.
        """
        outside = next((row for row in rows if not 0 <= row < self.B), None)
        if outside is not None:
            raise UsageError(f"row {outside} is out of range; the memory has {self.B} rows, counted from 0")
        index = torch.tensor(rows, dtype=torch.long, device=self.valid.device)
        selected = self.map_slots(lambda x, dim: x.index_select(1 if dim == 3 else 0, index))
        metadata = None if self.metadata is None else self.metadata.select_rows(rows)
        return replace(selected, num_tokens=self.num_tokens[index], metadata=metadata)

    @staticmethod
    def concat_rows(*memories: "KVMemory") -> "KVMemory":
        """Concatenate documents into one batch; rows with fewer slots are padded on the left with invalid ones.

        Raises:
            UsageError: If the shapes differ.
            CorruptArtifactError: If the memories were written by different models.
        """
        first = check_joinable("concat_rows", memories)
        M = max(memory.M for memory in memories)
        padded = [memory.map_slots(lambda x, dim, n=M - memory.M: pad_slots(x, dim, n)) for memory in memories]
        joined = {
            name: torch.cat([m.tensors()[name] for m in padded], 1 if name in ("positions", "ranks", "valid") else 0)
            for name in first.tensors()
        }
        known = [memory.metadata for memory in memories if memory.metadata is not None]
        return from_tensors(joined, KVMemoryMetadata.concat_rows(known) if known else None)

    @staticmethod
    def concat_documents(config: DecoderConfig, *memories: "KVMemory") -> "KVMemory":
        """Concatenate memories of the same rows: each document follows the one before it at consecutive positions.

        Keys are rotated on to their new positions, which RoPE allows without error beyond rounding. The documents were
        read apart, so no document has seen those before it.

        Args:
            config: Architecture of the decoder that wrote the memories.
            memories: At least one, in order.

        Raises:
            UsageError: If the shapes differ, or if the architecture's keys cannot be moved.
            CorruptArtifactError: If the memories were written by different models.
        """
        first = check_joinable("concat_documents", memories)
        odd = next((memory.B for memory in memories if memory.B != first.B), None)
        if odd is not None:
            raise UsageError(f"concat_documents: memories of {first.B} and {odd} rows; select the same rows of both")
        moved, start = list[KVMemory](), torch.zeros_like(first.num_tokens)
        for memory in memories:
            moved.append(memory.shift_positions(config, start) if moved else memory)
            start = start + memory.num_tokens
        sizes = [1 + m.ranks.masked_fill(~m.valid, -1).amax((0, 2, 3))[:, None, None] for m in moved]
        known = [memory.metadata for memory in memories if memory.metadata is not None]
        return KVMemory(
            tuple(torch.cat(layer, 2) for layer in zip(*(m.keys for m in moved), strict=True)),
            tuple(torch.cat(layer, 2) for layer in zip(*(m.values for m in moved), strict=True)),
            torch.cat([m.positions for m in moved], 3),
            torch.cat([merge_ranks(m.ranks, sizes, i) for i, m in enumerate(moved)], 3),
            torch.cat([m.valid for m in moved], 3),
            start,
            KVMemoryMetadata.concat_documents(known) if known else None,
        )

    def shift_positions(self, config: DecoderConfig, offset: Int[Tensor, " B"]) -> "KVMemory":
        """Return the memory as if its document began at position `offset` of each row. Raises like `move_slots`."""
        positions = self.positions + offset[:, None, None]
        return self.move_slots(config, positions, self.num_tokens + offset)

    def renumber_slots(self, config: DecoderConfig) -> "KVMemory":
        """Give the slots of every head consecutive positions from 0, as StreamingLLM does. Raises like `move_slots`.

        Raises:
            UsageError: If heads use different numbers of slots, so that the next token would have several positions.
        """
        if not self.has_equal_heads:
            raise UsageError("renumber_slots: the heads have different numbers of slots; compress with equal_heads")
        index = (self.valid.cumsum(3) - 1) * self.valid
        return self.move_slots(config, index, self.valid[0, :, 0].sum(1))

    def move_slots(
        self, config: DecoderConfig, positions: Int[Tensor, "L B G M"], num_tokens: Int[Tensor, " B"]
    ) -> "KVMemory":
        """Rotate the keys on to other positions.

        Args:
            config: Architecture of the decoder that wrote the memory.
            positions: New position of each slot.
            num_tokens: Position of the next token of each row.

        Raises:
            UsageError: If the architecture has learned positions, or RoPE frequencies that depend on the length.
        """
        if config.rope is None or config.rope.kind not in FIXED_FREQUENCIES:
            scheme = "learned positions" if config.rope is None else f"{config.rope.kind} RoPE"
            raise UsageError(f"memories of {config.family} with {scheme} cannot be moved; use one memory at a time")
        keys = list[Tensor]()
        for layer, (k, delta) in enumerate(zip(self.keys, (positions - self.positions).flatten(1, 2), strict=True)):
            if layer in config.nope_layers:
                keys.append(k)
                continue
            omega, _ = ROPE_SCALINGS[config.rope.kind](config.rope, config.head_dim, delta[:, 0])
            cos, sin = rope.cos_sin_tables(delta, omega, 1.0, torch.float32)
            heads = k.float().flatten(0, 1)[:, None]
            keys.append(rope.rotate_pairs(heads, cos, sin).view(k.shape).to(k.dtype))
        return replace(self, keys=tuple(keys), positions=positions, num_tokens=num_tokens)

    def save(self, path: str | Path) -> None:
        """Save the memory to one safetensors file.

        Raises:
            UsageError: If the memory has no metadata.
            NonFiniteError: If a number is not finite.
            DiskError: If there is not enough space.
        """
        if self.metadata is None:
            raise UsageError(f"{path}: this memory has no metadata that names its model; set `metadata` first")
        dtype = str(self.keys[0].dtype).removeprefix("torch.")
        tensors = self.tensors()
        heads = {
            f"{kind}.{i}": tensors[f"{kind}.{i}"][valid]
            for kind in ("keys", "values")
            for i, valid in enumerate(self.valid)
        }
        slots = {"positions": self.positions[self.valid].int(), "ranks": self.ranks[self.valid].int()}
        counts = {"slots": self.valid.sum(3), "num_tokens": self.num_tokens}
        save_kv_tensors(Path(path), heads | slots | counts, replace(self.metadata, dtype=dtype))

    @classmethod
    def load(cls, path: str | Path, reader: KVMemoryMetadata | None = None) -> "KVMemory":
        """Load a memory that `save` wrote, on the CPU and in its stored dtype.

        Args:
            path: File to read.
            reader: Metadata that the model at hand would write; if given, the file must fit it.

        Raises:
            CorruptArtifactError: If the file is damaged, is of a newer format, or was written for another model.
        """
        tensors, metadata = load_kv_tensors(Path(path))
        if reader is not None:
            metadata.check_reader(Path(path).name, reader)
        slots = tensors["slots"]
        valid = torch.arange(int(slots.max()), device="cpu") < slots[..., None]

        def unpack(x: Tensor, valid: Tensor) -> Tensor:
            padded = x.new_zeros(*valid.shape, *x.shape[1:])
            padded[valid] = x
            return padded

        padded = {name: unpack(tensors[name].long(), valid) for name in ("positions", "ranks")}
        padded |= {
            f"{kind}.{i}": unpack(tensors[f"{kind}.{i}"], layer)
            for kind in ("keys", "values")
            for i, layer in enumerate(valid)
        }
        return from_tensors(padded | {"valid": valid, "num_tokens": tensors["num_tokens"]}, metadata)


def from_tensors(tensors: dict[str, Tensor], metadata: KVMemoryMetadata | None) -> KVMemory:
    """Build a memory from the result of `KVMemory.tensors`."""
    L = sum(name.startswith("keys.") for name in tensors)
    keys, values = (tuple(tensors[f"{kind}.{i}"] for i in range(L)) for kind in ("keys", "values"))
    slots = {name: tensors[name] for name in ("positions", "ranks", "valid", "num_tokens")}
    return KVMemory(keys, values, **slots, metadata=metadata)


def merge_ranks(
    ranks: Int[Tensor, "L B G M"], sizes: Sequence[Int[Tensor, "B 1 1"]], document: int
) -> Int[Tensor, "L B G M"]:
    """Return the ranks of one of several documents in a memory of all, so that each has its share of every size."""
    merged = ranks.clone()
    for other, size in enumerate(sizes):
        scaled = ranks * size
        if other < document:
            merged += (scaled // sizes[document] + 1).minimum(size)
        elif other > document:
            merged += (-(-scaled // sizes[document])).minimum(size)
    return merged


def pad_slots(x: Tensor, dim: int, num_slots: int) -> Tensor:
    """Add empty slots on the left."""
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (num_slots, 0))


def check_joinable(operation: str, memories: tuple[KVMemory, ...]) -> KVMemory:
    """Return the first memory; raise if the memories cannot be concatenated."""
    if not memories:
        raise UsageError(f"{operation}: expected at least one memory")
    first = memories[0]
    for memory in memories[1:]:
        shapes = [(len(m.keys), *m.keys[0].shape[1::2]) for m in (first, memory)]
        if shapes[0] != shapes[1]:
            raise UsageError(
                f"{operation}: (layers, KV heads, head size) {shapes[1]} do not match {shapes[0]}; "
                "use memories of one model"
            )
        if (memory.metadata is None) != (first.metadata is None):
            raise UsageError(f"{operation}: one memory has metadata and another has none")
        if memory.metadata is not None and first.metadata is not None:
            memory.metadata.check_joinable(operation, first.metadata)
    return first
