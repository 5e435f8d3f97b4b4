"""KV cache of a decoder, with operations that select, join, move and store its rows and slots.

Each returns a new cache and leaves the old one unchanged; gradients flow through all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.errors import CorruptArtifactError
from laconic.models.cache_slots import CacheSlots
from laconic.models.config import DecoderConfig
from laconic.models.kv_prefix import KVPrefix
from laconic.storage.atomic import load_artifact, save_artifact

RowIndex = Sequence[int] | Int[Tensor, " N"] | Bool[Tensor, " B"]


def build_row_index(rows: RowIndex, B: int) -> Int[Tensor, " N"]:
    """Return the indices of the selected rows of B: the given ones, or where a mask is True."""
    index = torch.as_tensor(rows)
    if index.dtype == torch.bool:
        if len(index) != B:
            raise ValueError(f"a mask of {len(index)} rows cannot select from {B}")
        return index.nonzero()[:, 0]
    index = index.long()  # before the comparisons, which torch does not have for uint16 and uint32
    out_of_range = index[(index < 0) | (index >= B)]
    if len(out_of_range):
        raise ValueError(f"row {int(out_of_range[0])} does not exist; rows are 0 to {B - 1}")
    return index


@dataclass(frozen=True, eq=False)
class KVCache(CacheSlots):
    """Immutable KV cache of a decoder.

    A slot that is not valid (padding) is never attended to and does not count as a position.

    Args:
        keys: Per layer, rotated keys [B, G, S, E].
        values: Per layer, values [B, G, S, E].
        positions: Position of each slot [B, S].
        valid: True at real slots [B, S].
        prefix: Keys and values before the slots; their number may differ between KV heads.

    Examples:
        >>> import torch, laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> cache = decoder(decoder.embed(torch.tensor([[1, 17, 42]]))).cache
        >>> cache.S, cache.crop(2).S, cache.repeat_rows(4).B
        (3, 2, 4)
    """

    def __repr__(self) -> str:
        dtype = str(self.keys[0].dtype).removeprefix("torch.") if self.keys else "empty"
        return f"KVCache({len(self.keys)} layers, B={self.B}, S={self.S}{'+prefix' if self.prefix else ''}, {dtype})"

    @property
    def next_position(self) -> Int[Tensor, " B"]:
        """Position of the next token of each row."""
        return self.continue_positions(self.valid.new_ones(self.B, 1))[:, 0]

    @property
    def num_bytes(self) -> int:
        """Bytes of every row, also where rows share memory: 2 L B G S E numbers, 9 B S bytes, and the prefix."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values alone, those of the prefix included."""
        return sum(t.nbytes for t in self.tensors().values() if t.is_floating_point())

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name in a saved file."""
        keys = {f"keys.{i}": k for i, k in enumerate(self.keys)}
        values = {f"values.{i}": v for i, v in enumerate(self.values)}
        prefix = {} if self.prefix is None else self.prefix.tensors()
        return keys | values | {"positions": self.positions, "valid": self.valid} | prefix

    def append(self, other: "KVCache") -> "KVCache":
        """Append another cache's slots on the right, row by row.

        Raises:
            ValueError: The numbers of rows or layers differ, the other cache has a prefix, or it is no KVCache.
        """
        if not isinstance(other, KVCache) or other.prefix is not None:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError("append: give a KVCache without a prefix, which can only come first")
        if len(other.keys) != len(self.keys) or other.B != self.B:
            raise ValueError(
                f"append: {other.B} rows of {len(other.keys)} layers do not match {self.B} rows of {len(self.keys)}"
            )
        return replace(concat_tensors([self, other], 2, 1), prefix=self.prefix)

    def gather_slots(self, slots: Int[Tensor, "B K"]) -> "KVCache":
        """Select K slots per row, in the given order. Gradients flow to the selected slots.

        Raises:
            ValueError: The shape does not match, or an index is out of range.
        """
        if slots.ndim != 2 or slots.shape[0] != self.B:
            raise ValueError(f"gather_slots: indices are {list(slots.shape)}; expected [{self.B}, K], one list per row")
        out_of_range = (slots < 0) | (slots >= self.S)
        if out_of_range.any():
            row = int(out_of_range.nonzero()[0, 0])
            raise ValueError(f"gather_slots: slot {int(slots[out_of_range][0])} of {self.S} in row {row}")
        index = slots[:, None, :, None]
        return self._map_slots(
            lambda x: x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])), lambda x: x.gather(1, slots)
        )

    def select_rows(self, rows: RowIndex) -> "KVCache":
        """Select rows by their indices, in the given order; repeats are allowed. A boolean mask selects its True rows.

        Raises:
            ValueError: A row is out of range, or a mask has another length.
        """
        index = build_row_index(rows, self.B).to(self.valid.device)
        return self.map_tensors(lambda x: x.index_select(0, index))

    def repeat_rows(self, repeats: int) -> "KVCache":
        """Repeat each row, side by side. A single row is expanded without a copy."""
        if self.B == 1:
            return self.map_tensors(lambda x: x.expand(repeats, *x.shape[1:]))
        return self.map_tensors(lambda x: x.repeat_interleave(repeats, 0))

    @staticmethod
    def concat_rows(*caches: "KVCache") -> "KVCache":
        """Concatenate the rows of several caches; shorter ones are padded on the left with invalid slots.

        Raises:
            ValueError: No cache is given, or their layers, heads or head sizes differ.
        """
        if not caches:
            raise ValueError("concat_rows: pass at least one cache")
        shapes = {cache.shape_summary for cache in caches}
        if len(shapes) > 1:
            raise ValueError(f"concat_rows: (layers, KV heads, head size) does not match: {shapes}")
        S = max(cache.S for cache in caches)
        padded = [cache.pad_left(S - cache.S) for cache in caches]
        prefix = next((cache.prefix for cache in caches if cache.prefix is not None), None)
        if prefix is not None:
            prefix = KVPrefix.concat_rows([c.prefix or KVPrefix.empty(prefix, c.B) for c in caches])
        return replace(concat_tensors(padded, 0, 0), prefix=prefix)

    def pad_left(self, num_slots: int) -> "KVCache":
        """Add invalid slots on the left. Raises ValueError for a negative number."""
        if num_slots < 0:
            raise ValueError(f"num_slots {num_slots} is negative; crop removes slots")
        return self._map_slots(lambda x: F.pad(x, (0, 0, num_slots, 0)), lambda x: F.pad(x, (num_slots, 0)))

    def with_valid(self, valid: Bool[Tensor, "B S"]) -> "KVCache":
        """Replace the validity mask; positions stay. Raises ValueError if the shapes differ."""
        if valid.shape != self.valid.shape:
            raise ValueError(f"valid is {list(valid.shape)}, the cache {list(self.valid.shape)}")
        return replace(self, valid=valid.bool())

    def detach(self) -> "KVCache":
        """Detach every tensor from the graph."""
        return self.map_tensors(lambda x: x.detach())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "KVCache":
        """Move to a device, and convert keys and values to a dtype. Raises ValueError for one of integers."""
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype {dtype} is not a floating-point type")
        return self.map_tensors(lambda x: x.to(device, dtype if x.is_floating_point() else None))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "KVCache":
        """Apply `function` to every tensor."""
        prefix = None if self.prefix is None else self.prefix.map_tensors(function)
        return replace(self._map_slots(function, function), prefix=prefix)

    def is_equal(self, other: "KVCache") -> bool:
        """Return whether every tensor is equal bit for bit and in dtype."""
        mine, theirs = self.tensors(), other.tensors()
        pairs = [(mine[name], theirs[name]) for name in mine if name in theirs]
        return mine.keys() == theirs.keys() and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)

    def save(self, path: str | Path, decoder: Any) -> None:
        """Save to a safetensors file at `path` that only the same `decoder` can load; its fingerprint is stored."""
        save_artifact(Path(path), self.tensors(), "cache", {"model": decoder.fingerprint})

    @classmethod
    def load(cls, path: str | Path, decoder: Any) -> "KVCache":
        """Load a file that `save` wrote to `path` for the same `decoder`.

        Raises:
            CorruptArtifactError: The file was changed, or belongs to other weights.
        """
        tensors, metadata = load_artifact(Path(path), "cache")
        writer = metadata.get("model")
        if writer != decoder.fingerprint:
            raise CorruptArtifactError(f"{path} was written for weights {writer}, this model is {decoder.fingerprint}")
        invalid = find_invalid_tensor(tensors, decoder.config)
        if invalid is not None:
            raise CorruptArtifactError(f"{path}: tensor {invalid} is missing or has an unexpected shape or dtype")
        keys = tuple(tensors[f"keys.{i}"] for i in range(decoder.config.num_hidden_layers))
        values = tuple(tensors[f"values.{i}"] for i in range(decoder.config.num_hidden_layers))
        return cls(keys, values, tensors["positions"], tensors["valid"], KVPrefix.from_tensors(tensors))


def concat_tensors(caches: Sequence[KVCache], axis_of_heads: int, axis: int) -> KVCache:
    """Concatenate keys and values [B, G, S, E] along one axis, positions and validity [B, S] along another."""
    return KVCache(
        tuple(torch.cat(layer, axis_of_heads) for layer in zip(*(cache.keys for cache in caches), strict=True)),
        tuple(torch.cat(layer, axis_of_heads) for layer in zip(*(cache.values for cache in caches), strict=True)),
        torch.cat([cache.positions for cache in caches], axis),
        torch.cat([cache.valid for cache in caches], axis),
    )


def find_invalid_tensor(tensors: Mapping[str, Tensor], config: DecoderConfig) -> str | None:
    """Return the name of a saved tensor that is missing, unexpected, or of another shape or dtype than expected."""
    L, G, E = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    valid, sizes = tensors.get("valid"), tensors.get("prefix_sizes")
    if valid is None or valid.ndim != 2:
        return "valid"
    B, S = valid.shape
    expected: dict[str, tuple[tuple[int, ...], object]] = {  # shape, and dtype; True is any floating-point dtype
        **{f"{kind}.{i}": ((B, G, S, E), True) for kind in ("keys", "values") for i in range(L)},
        "positions": ((B, S), torch.long),
        "valid": ((B, S), torch.bool),
    }
    if sizes is not None:
        if sizes.shape != (L, G) or sizes.dtype != torch.long or bool((sizes < 0).any()):
            return "prefix_sizes"
        expected |= {"prefix_sizes": ((L, G), torch.long), "prefix_tokens": ((B,), torch.long)}
        for i, N in enumerate(map(int, sizes.sum(1))):
            expected |= {f"prefix_{kind}.{i}": ((B, N, E), True) for kind in ("keys", "values")}
            if "prefix_valid.0" in tensors:
                expected[f"prefix_valid.{i}"] = ((B, N), torch.bool)
    actual = {name: (tuple(x.shape), x.is_floating_point() or x.dtype) for name, x in tensors.items()}
    return min((name for name, _ in expected.items() ^ actual.items()), default=None)
