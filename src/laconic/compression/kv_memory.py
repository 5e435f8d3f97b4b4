"""KV memory: the keys and values of a document that a model keeps, as an immutable value.

Each layer and KV head keeps its own positions. Keys are stored as the decoder rotated them, so that a memory continues
as the document's KV cache does: new tokens follow at the position after the document.

Shapes: L layers, B documents, G KV heads, M slots, E head size.
"""

from collections.abc import Callable
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
        positions: Position in the document of each slot [L, B, G, M].
        ranks: Importance of each slot within its head [L, B, G, M]; 0 is the most important.
        valid: True at slots in use [B, M]; rows may have different numbers of them.
        num_tokens: Tokens read [B]; the next token has this position.
        metadata: The model that wrote the memory, the method, and the texts; None for a memory that is not saved.

    Example:
        >>> import torch, laconic
        >>> from laconic.compression.kv_memory import KVMemory
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> cache = decoder(decoder.embed(torch.tensor([[1, 17, 42, 5]]))).cache
        >>> memory = KVMemory.from_cache(cache).keep_top_slots(2)
        >>> memory.M, memory.to_cache().S, memory.num_tokens.tolist()
        (2, 2, [4])
    """

    keys: tuple[Float[Tensor, "B G M E"], ...]
    values: tuple[Float[Tensor, "B G M E"], ...]
    positions: Int[Tensor, "L B G M"]
    ranks: Int[Tensor, "L B G M"]
    valid: Bool[Tensor, "B M"]
    num_tokens: Int[Tensor, " B"]
    metadata: KVMemoryMetadata | None = None

    def __repr__(self) -> str:
        shape = f"{len(self.keys)} layers, {self.keys[0].shape[1]} KV heads" if self.keys else "no layers"
        tokens, slots = list(map(int, self.num_tokens)), list(map(int, self.num_slots))
        return f"KVMemory({tokens} tokens in {slots} slots, {shape})"

    @classmethod
    def from_cache(cls, cache: KVCache, metadata: KVMemoryMetadata | None = None) -> "KVMemory":
        """Return a memory of all slots of a cache; later slots count as more important."""
        L, G, _ = cache.shape_summary
        shape = (L, cache.B, G, cache.S)
        ranks = torch.arange(cache.S - 1, -1, -1, device=cache.valid.device).expand(shape)
        num_tokens = 1 + F.pad(cache.positions.masked_fill(~cache.valid, -1), (1, 0), value=-1).amax(1)
        positions = cache.positions[None, :, None].expand(shape)
        return cls(cache.keys, cache.values, positions, ranks, cache.valid, num_tokens, metadata)

    @property
    def B(self) -> int:
        """Number of documents."""
        return self.valid.shape[0]

    @property
    def M(self) -> int:
        """Number of slots of a head, valid or not."""
        return self.valid.shape[1]

    @property
    def num_slots(self) -> Int[Tensor, " B"]:
        """Number of slots in use of each document, equal in all heads and layers."""
        return self.valid.sum(1)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors: 2 L B G M E numbers of the keys' dtype, and the positions and ranks."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

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
            valid=function(self.valid, 1),
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
        slot = torch.arange(self.M, device=self.valid.device)
        is_last = slot == (slot * self.valid).amax(1, keepdim=True)
        positions = torch.where(is_last, self.num_tokens[:, None] - 1, self.positions.amax((0, 2)).long())
        return KVCache(self.keys, self.values, positions * self.valid, self.valid)

    def keep_top_slots(self, num_slots: int) -> "KVMemory":
        """Keep the `num_slots` most important slots of each head.

        Raises:
            UsageError: If `num_slots` is below 1.
        """
        if num_slots < 1:
            raise UsageError(f"cannot keep {num_slots} slots; give 1 or more")
        M = min(num_slots, self.M)
        ranks = self.ranks.masked_fill(~self.valid[:, None], torch.iinfo(self.ranks.dtype).max)
        order = ranks.argsort(dim=-1, stable=True)[..., :M].sort(-1).values

        def gather(x: Tensor, index: Tensor) -> Tensor:
            return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))

        # every head of a row has the same number of valid slots, so any head's selection gives the row's mask
        return replace(
            self,
            keys=tuple(gather(k, i) for k, i in zip(self.keys, order, strict=True)),
            values=tuple(gather(v, i) for v, i in zip(self.values, order, strict=True)),
            positions=self.positions.gather(3, order),
            ranks=self.ranks.gather(3, order),
            valid=self.valid.gather(1, order[0, :, 0]),
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
            name: torch.cat([m.tensors()[name] for m in padded], 1 if name in ("positions", "ranks") else 0)
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
        shares = torch.cat([m.ranks / m.num_slots[:, None, None].clamp(min=1) for m in moved], 3)
        known = [memory.metadata for memory in memories if memory.metadata is not None]
        return KVMemory(
            tuple(torch.cat(layer, 2) for layer in zip(*(m.keys for m in moved), strict=True)),
            tuple(torch.cat(layer, 2) for layer in zip(*(m.values for m in moved), strict=True)),
            torch.cat([m.positions for m in moved], 3),
            shares.argsort(dim=-1, stable=True).argsort(-1),
            torch.cat([m.valid for m in moved], 1),
            start,
            KVMemoryMetadata.concat_documents(known) if known else None,
        )

    def shift_positions(self, config: DecoderConfig, offset: Int[Tensor, " B"]) -> "KVMemory":
        """Return the memory as if its document began at position `offset` of each row.

        Raises:
            UsageError: If the architecture has learned positions, or RoPE frequencies that depend on the length.
        """
        if config.rope is None or config.rope.kind not in FIXED_FREQUENCIES:
            scheme = "learned positions" if config.rope is None else f"{config.rope.kind} RoPE"
            raise UsageError(f"memories of {config.family} with {scheme} cannot be moved; use one memory at a time")
        longest = self.num_tokens + offset
        omega, _ = ROPE_SCALINGS[config.rope.kind](config.rope, config.head_dim, longest)
        cos, sin = rope.cos_sin_tables(offset[:, None], omega, 1.0, torch.float32)
        keys = tuple(
            k if l in config.nope_layers else rope.rotate_pairs(k.float(), cos, sin).to(k.dtype)
            for l, k in enumerate(self.keys)
        )
        positions = self.positions + offset[None, :, None, None] * self.valid[None, :, None]
        return replace(self, keys=keys, positions=positions, num_tokens=longest)

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
        tensors = self.tensors() | {"positions": self.positions.int(), "ranks": self.ranks.int()}
        save_kv_tensors(Path(path), tensors, replace(self.metadata, dtype=dtype))

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
        slots = {name: tensors[name].long() for name in ("positions", "ranks")}
        return from_tensors(tensors | slots, metadata)


def from_tensors(tensors: dict[str, Tensor], metadata: KVMemoryMetadata | None) -> KVMemory:
    """Build a memory from the result of `KVMemory.tensors`."""
    L = sum(name.startswith("keys.") for name in tensors)
    keys, values = (tuple(tensors[f"{kind}.{i}"] for i in range(L)) for kind in ("keys", "values"))
    slots = {name: tensors[name] for name in ("positions", "ranks", "valid", "num_tokens")}
    return KVMemory(keys, values, **slots, metadata=metadata)


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
