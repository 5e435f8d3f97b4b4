"""KV memory: the keys and values of a document that a model keeps, as an immutable value.

Each layer and KV head keeps its own positions, and perhaps its own number of them; nothing is padded. Keys are stored
as the decoder rotated them, so that a memory continues as the document's KV cache does: new tokens follow at the
position after the document.

Shapes: L layers, B documents, G KV heads, N slots of all documents and heads of one or all layers, E head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from laconic.compression.kv.memory_file import FILE_KIND, KVMemoryMetadata
from laconic.compression.kv.scores import concat_parts, merge_ranks
from laconic.compression.saved_memory import SavedMemory, Target, check_size, list_rows, resolve_target
from laconic.errors import UsageError
from laconic.generation.config import check_type
from laconic.models import rope
from laconic.models.cache import KVCache, RowIndex
from laconic.models.config import DecoderConfig
from laconic.models.kv_prefix import KVPrefix
from laconic.models.ops.rope_scaling import ROPE_SCALINGS, get_movable_rope

SLOT_TENSORS = ("positions", "ranks", "slots", "num_tokens")


@dataclass(frozen=True, eq=False)
class KVMemory(SavedMemory[KVMemoryMetadata]):
    """Keys and values that replace the text of documents in a prompt, one row per document.

    Slots are stored document by document, head by head, and in ascending order of their positions. `positions` and
    `ranks` have the slots of all layers, layer by layer.

    Args:
        keys: Per layer, rotated keys [N, E].
        values: Per layer, values [N, E].
        positions: Position of each slot.
        ranks: The slots with ranks below m are a memory of m slots per head, on average over all heads.
        slots: Number of slots of each layer, document and head [L, B, G].
        num_tokens: Position of the next token [B]: tokens read in one window, slots of a text read in several.
        metadata: The model that wrote the memory, the method, and the texts; None for a memory that is not saved.

    Examples:
        >>> import torch, laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> cache = decoder(decoder.embed(torch.tensor([[1, 17, 42, 5]]))).cache
        >>> memory = laconic.KVMemory.from_cache(cache).keep_top_slots(2)
        >>> memory.M, memory.to_cache().S, memory.num_tokens.tolist()
        (2, 2, [4])
    """

    FILE_KIND: ClassVar = FILE_KIND
    METADATA_TYPE: ClassVar = KVMemoryMetadata
    UNIT: ClassVar = "slots per head"

    keys: tuple[Float[Tensor, "_ E"], ...]
    values: tuple[Float[Tensor, "_ E"], ...]
    positions: Int[Tensor, " N"]
    ranks: Int[Tensor, " N"]
    slots: Int[Tensor, "L B G"]
    num_tokens: Int[Tensor, " B"]
    metadata: KVMemoryMetadata | None = None

    def __repr__(self) -> str:
        tokens = list(map(int, self.sizes[0]))
        slots = [round(float(n), 1) for n in self.num_slots]
        L, _, G = self.slots.shape
        return f"KVMemory({tokens} tokens in {slots} slots per head, {L} layers, {G} KV heads)"

    @classmethod
    def from_cache(cls, cache: KVCache, metadata: KVMemoryMetadata | None = None) -> "KVMemory":
        """Return a memory, with `metadata`, of all valid slots of `cache`; later slots count as more important.

        If all slots are valid, the memory shares the cache's keys and values.

        Raises:
            UsageError: If the cache begins with a memory whose heads have different numbers of slots.
        """
        if cache.prefix is not None:
            raise UsageError("from_cache: heads of this cache have different numbers of slots; use its memory itself")
        L, G, _ = cache.shape_summary
        is_head_valid = cache.valid[:, None].expand(-1, G, -1)
        all_valid = bool(cache.valid.all())

        def pack(x: Tensor) -> Tensor:
            return x.expand(L, cache.B, G, -1)[is_head_valid.expand(L, -1, -1, -1)]

        return cls(
            keys=tuple(k.flatten(0, 2) if all_valid else k[is_head_valid] for k in cache.keys),
            values=tuple(v.flatten(0, 2) if all_valid else v[is_head_valid] for v in cache.values),
            positions=pack(cache.positions[:, None]),
            ranks=pack(torch.arange(cache.S - 1, -1, -1, device=cache.valid.device)),
            slots=cache.valid.sum(1)[:, None].repeat(L, 1, G),
            num_tokens=cache.next_position,
            metadata=metadata,
        )

    @property
    def B(self) -> int:
        """Number of documents."""
        return self.num_tokens.shape[0]

    @property
    def M(self) -> int:
        """Largest number of slots of a head."""
        return int(self.slots.max()) if self.slots.numel() else 0

    @property
    def num_slots(self) -> Float[Tensor, " B"]:
        """Slots per head of each document, averaged over all heads and layers."""
        return self.slots.double().mean((0, 2))

    @property
    def sizes(self) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        documents = self.metadata.documents if self.metadata is not None else ()
        tokens = [sum(document.tokens for document in row) for row in documents]
        return torch.tensor(tokens) if any(tokens) else self.num_tokens, self.num_slots

    @property
    def shape_text(self) -> str:
        return f"{len(self.keys)} layers, {self.slots.shape[2]} KV heads of {self.keys[0].shape[1]}"

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name in a file."""
        layers = {f"keys.{i}": k for i, k in enumerate(self.keys)}
        layers |= {f"values.{i}": v for i, v in enumerate(self.values)}
        return layers | {name: getattr(self, name) for name in SLOT_TENSORS}

    @property
    def has_equal_heads(self) -> bool:
        """Whether all heads of a document have the same number of slots."""
        return bool((self.slots == self.slots[:1, :, :1]).all())

    @property
    def num_bytes(self) -> int:
        """Size of the keys and values: 2 E numbers of their dtype for each slot."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    @property
    def row_index(self) -> Int[Tensor, " N"]:
        """Document of each slot of all layers."""
        L, B, _ = self.slots.shape
        rows = torch.arange(B, device=self.slots.device).repeat(L)
        return rows.repeat_interleave(self.slots.sum(2).flatten())

    @property
    def slot_index(self) -> Int[Tensor, " N"]:
        """Index of each slot of all layers within its head."""
        return torch.cat([torch.arange(n, device=self.slots.device) for n in to_ints(self.slots)])

    @property
    def num_ranks(self) -> Int[Tensor, " B"]:
        """One more than the largest rank of each document."""
        return self.slots.new_zeros(self.B).scatter_reduce(0, self.row_index, self.ranks + 1, "amax")

    def split_heads(self, x: Shaped[Tensor, "N *rest"]) -> list[Tensor]:
        """Split a tensor with an entry per slot of all layers, in the order of `slots`, into its heads."""
        return list(torch.split(x, to_ints(self.slots)))

    def split_layers(self, x: Shaped[Tensor, "N *rest"]) -> list[Tensor]:
        """Split a tensor with an entry per slot of all layers into layers."""
        return list(torch.split(x, to_ints(self.slots.sum((1, 2)))))

    def to(self, device: Target | None = None, dtype: torch.dtype | None = None) -> "KVMemory":
        """Move to a device, and convert keys and values to a dtype; one argument may be either, as in `Tensor.to`.

        Raises:
            UsageError: If torch cannot use the device, or the dtype is not a floating-point one.
        """
        device, dtype = resolve_target(device, dtype)
        return replace(
            self,
            keys=tuple(k.to(device, dtype) for k in self.keys),
            values=tuple(v.to(device, dtype) for v in self.values),
            **{name: getattr(self, name).to(device) for name in SLOT_TENSORS},
        )

    def to_cache(self) -> KVCache:
        """Return the KV cache that a decoder or `laconic.generate` continues from, of as many bytes as the memory.

        For one document it shares the memory's keys and values. A document whose heads have different numbers of slots
        becomes a KV prefix. Otherwise the cache has one position per slot for all heads: the largest of the heads, and
        `num_tokens` - 1 in the last slot. These positions only decide where the next token stands.
        """
        if self.B != 1:
            return KVCache.concat_rows(*(self.select_rows([row]).to_cache() for row in range(self.B)))
        return self._to_dense_cache() if self.has_equal_heads else self.to_prefix_cache()

    def _to_dense_cache(self) -> KVCache:
        """Return the cache of one document whose heads have equally many slots."""
        L, _, G = self.slots.shape
        M = self.M
        keys = tuple(k.view(1, G, M, k.shape[1]) for k in self.keys)
        values = tuple(v.view(1, G, M, v.shape[1]) for v in self.values)
        positions = self.positions.view(L, 1, G, M).amax((0, 2))
        positions = torch.cat([positions[:, : M - 1], self.num_tokens[:, None] - 1], 1)
        return KVCache(keys, values, positions, torch.ones_like(positions, dtype=torch.bool))

    def to_prefix_cache(self) -> KVCache:
        """Return the cache of one document with a KV prefix and no slots."""
        L, _, G = self.slots.shape
        sizes = tuple(tuple(to_ints(layer)) for layer in self.slots[:, 0])
        prefix = KVPrefix(
            tuple(k[None] for k in self.keys), tuple(v[None] for v in self.values), (), self.num_tokens, sizes
        )
        no_slots = (self.keys[0].new_empty(1, G, 0, self.keys[0].shape[1]),) * L
        no_positions = self.num_tokens.new_empty(1, 0)
        return KVCache(no_slots, no_slots, no_positions, no_positions.bool(), prefix)

    def keep_top_slots(self, num_slots: int) -> "KVMemory":
        """Keep the most important slots: `num_slots` per head, on average over heads if the ranks compare heads.

        The metadata of a smaller memory has no measurements, which were of the larger one.

        Raises:
            UsageError: If `num_slots` is not an integer, or below 1.
        """
        check_size(num_slots, "slots", 1)
        is_top = self.ranks < num_slots
        if bool(is_top.all()):
            return self
        layers = self.split_layers(is_top)
        counts = [head.sum() for head in self.split_heads(is_top)]
        return replace(
            self,
            keys=tuple(k[top] for k, top in zip(self.keys, layers, strict=True)),
            values=tuple(v[top] for v, top in zip(self.values, layers, strict=True)),
            positions=self.positions[is_top],
            ranks=self.ranks[is_top],
            slots=torch.stack(counts).view_as(self.slots),
            metadata=None if self.metadata is None else self.metadata.keep_top_slots(int(num_slots)),
        )

    def select_rows(self, rows: RowIndex) -> "KVMemory":
        """Select documents by index or by a boolean mask; an index may repeat.

        Raises:
            UsageError: If there is no index, or one is not an integer or is out of range.
        """
        rows = list_rows(rows, self.B)
        sizes = self.slots.sum(2)

        def select(x: Tensor, sizes: Int[Tensor, "n B"]) -> Tensor:
            parts = torch.split(x, to_ints(sizes))
            return torch.cat([x[:0], *(parts[i * self.B + row] for i in range(len(sizes)) for row in rows)])

        return KVMemory(
            keys=tuple(select(k, layer[None]) for k, layer in zip(self.keys, sizes, strict=True)),
            values=tuple(select(v, layer[None]) for v, layer in zip(self.values, sizes, strict=True)),
            positions=select(self.positions, sizes),
            ranks=select(self.ranks, sizes),
            slots=self.slots[:, rows],
            num_tokens=self.num_tokens[rows],
            metadata=None if self.metadata is None else self.metadata.select_rows(rows),
        )

    @staticmethod
    def concat_rows(*memories: "KVMemory") -> "KVMemory":
        """Concatenate documents into one batch.

        Raises:
            UsageError: If the shapes differ.
            CorruptArtifactError: If the memories were written by different models.
        """
        KVMemory.check_joinable("concat_rows", memories, equal_rows=False)
        known = [memory.metadata for memory in memories if memory.metadata is not None]
        return KVMemory(
            keys=tuple(torch.cat(layer) for layer in zip(*(m.keys for m in memories), strict=True)),
            values=tuple(torch.cat(layer) for layer in zip(*(m.values for m in memories), strict=True)),
            positions=concat_parts([m.split_layers(m.positions) for m in memories]),
            ranks=concat_parts([m.split_layers(m.ranks) for m in memories]),
            slots=torch.cat([m.slots for m in memories], 1),
            num_tokens=torch.cat([m.num_tokens for m in memories]),
            metadata=replace(KVMemoryMetadata.concat_rows(known), measured={}) if known else None,
        )

    @staticmethod
    def concat_documents(config: DecoderConfig, *memories: "KVMemory") -> "KVMemory":
        """Concatenate memories of the same rows: each document follows the one before it at consecutive positions.

        Keys are rotated on to their new positions, which RoPE of the decoder's `config` allows without error beyond
        rounding. The documents were read apart, so no document has seen those before it in `memories`.

        Raises:
            UsageError: If the shapes differ, or if the architecture's keys cannot be moved.
            CorruptArtifactError: If the memories were written by different models.
        """
        check_type("config", config, DecoderConfig, "the decoder's, as in concat_documents(decoder.config, *memories)")
        first = KVMemory.check_joinable("concat_documents", memories, equal_rows=True)
        moved = [first]  # which stays at its positions
        start = first.num_tokens
        for memory in memories[1:]:
            end = start + memory.num_tokens
            moved.append(memory.move_slots(config, memory.positions + start[memory.row_index], end))
            start = end
        known = [memory.metadata for memory in memories if memory.metadata is not None]
        sizes = [m.num_ranks for m in moved]
        ranks = [merge_ranks(m.ranks, [size[m.row_index] for size in sizes], i) for i, m in enumerate(moved)]
        keys = concat_parts([m.split_heads(torch.cat(m.keys)) for m in moved])
        values = concat_parts([m.split_heads(torch.cat(m.values)) for m in moved])
        slots = torch.stack([m.slots for m in moved]).sum(0)
        layers = to_ints(slots.sum((1, 2)))
        return KVMemory(
            keys=torch.split(keys, layers),
            values=torch.split(values, layers),
            positions=concat_parts([m.split_heads(m.positions) for m in moved]),
            ranks=concat_parts([m.split_heads(x) for m, x in zip(moved, ranks, strict=True)]),
            slots=slots,
            num_tokens=start,
            metadata=KVMemoryMetadata.concat_documents(known) if known else None,
        )

    def renumber_slots(self, config: DecoderConfig) -> "KVMemory":
        """Give the slots of every head consecutive positions from 0, as StreamingLLM does.

        The next token has one position, so that all heads need the same number of slots. Raises like `move_slots`.
        """
        if not self.has_equal_heads:
            raise UsageError("renumber_slots: the heads have different numbers of slots; compress with equal_heads")
        return self.move_slots(config, self.slot_index, self.slots[0].amax(1))

    def move_slots(
        self, config: DecoderConfig, positions: Int[Tensor, " N"], num_tokens: Int[Tensor, " B"]
    ) -> "KVMemory":
        """Rotate the keys on to other `positions`; the next token of each row has the position `num_tokens`.

        Raises `UsageError` if the `config` of the decoder has learned positions, or RoPE that depends on the length.
        """
        keys = rotate_keys(config, self.keys, self.split_layers(positions - self.positions))
        return replace(self, keys=keys, positions=positions, num_tokens=num_tokens)

    def save(self, path: str | Path) -> None:
        """Save the memory to one safetensors file; one that exists is replaced.

        Raises:
            UsageError: If the memory has no metadata, or `path` is a folder.
            NonFiniteError: If a number is not finite.
            DiskError: If there is not enough space.
        """
        tensors = self.tensors() | {"positions": self.positions.int(), "ranks": self.ranks.int()}
        self.write(path, tensors | {"slots": self.slots.contiguous()}, self.keys[0].dtype)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], metadata: KVMemoryMetadata) -> "KVMemory":
        """Build a memory with `metadata` from the `tensors` of a file, which have the names that `tensors` returns."""
        keys = tuple(tensors[f"keys.{i}"] for i in range(metadata.layers))
        values = tuple(tensors[f"values.{i}"] for i in range(metadata.layers))
        positions, ranks = tensors["positions"].long(), tensors["ranks"].long()
        return cls(keys, values, positions, ranks, tensors["slots"], tensors["num_tokens"], metadata)


def to_ints(x: Int[Tensor, "*shape"]) -> list[int]:
    """Return the entries of a tensor in order."""
    return list(map(int, x.flatten()))


def rotate_keys(
    config: DecoderConfig, keys: Sequence[Float[Tensor, "_ E"]], offsets: Sequence[Int[Tensor, " _"]]
) -> tuple[Float[Tensor, "_ E"], ...]:
    """Rotate the keys of every layer; `offsets` is the new position of each key minus the old one.

    RoPE allows this without error beyond rounding.
    """
    scaling = get_movable_rope(config.rope, config.family, "use one memory at a time")
    rotated = list[Tensor]()
    for layer, (k, offset) in enumerate(zip(keys, offsets, strict=True)):
        if layer in config.nope_layers:
            rotated.append(k)
            continue
        omega, _ = ROPE_SCALINGS[scaling.kind](scaling, config.head_dim, offset[:1])
        cos, sin = rope.cos_sin_tables(offset[None], omega, 1.0, torch.float32)
        rotated.append(rope.rotate_pairs(k.float()[None, None], cos, sin)[0, 0].to(k.dtype))
    return tuple(rotated)
