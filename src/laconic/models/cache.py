"""KV cache as an immutable value: rotated keys and values of every layer, their positions, and which slots are valid.

Every operation returns a new cache and leaves the old one unchanged; gradients flow through all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.errors import CorruptArtifactError
from laconic.models.config import DecoderConfig
from laconic.storage import atomic


@runtime_checkable
class HasFingerprint(Protocol):
    """A decoder, as far as a saved cache needs it."""

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class KVCache:
    """Immutable KV cache of a decoder.

    A slot that is not valid (padding) is never attended to and does not count as a position.

    Args:
        keys: Per layer, rotated keys [B, G, S, E].
        values: Per layer, values [B, G, S, E].
        positions: Position of each slot [B, S].
        valid: True at real slots [B, S].
        head_valid: Per layer, True at the slots that each KV head attends to [B, G, S, 1]; empty if all heads attend
            to all valid slots.

    Example:
        >>> import torch, laconic
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama"))
        >>> cache = decoder(decoder.embed(torch.tensor([[1, 17, 42]]))).cache
        >>> cache.S, cache.crop(2).S, cache.repeat_rows(4).B
        (3, 2, 4)
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: Int[Tensor, "B S"]
    valid: Bool[Tensor, "B S"]
    head_valid: tuple[Bool[Tensor, "B G S 1"], ...] = ()

    def __repr__(self) -> str:
        dtype = str(self.keys[0].dtype).removeprefix("torch.") if self.keys else "empty"
        return f"KVCache({len(self.keys)} layers, B={self.B}, S={self.S}, {dtype})"

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        B: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "KVCache":
        """Return a cache with no slots; passing it to a decoder equals passing None."""
        shape = (B, config.num_key_value_heads, 0, config.head_dim)
        tensors = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers))
        positions = torch.empty(B, 0, dtype=torch.long, device=device)
        return cls(tensors, tensors, positions, positions.bool())

    @property
    def B(self) -> int:
        """Number of rows."""
        return self.valid.shape[0]

    @property
    def S(self) -> int:
        """Number of slots, valid or not."""
        return self.valid.shape[1]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors: 2 L B G S E numbers of the keys' dtype, and 9 B S bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def shape_summary(self) -> tuple[int, int, int]:
        """Number of layers, number of KV heads, head size."""
        return (len(self.keys), self.keys[0].shape[1], self.keys[0].shape[3]) if self.keys else (0, 0, 0)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name in a saved file."""
        keys = {f"keys.{i}": k for i, k in enumerate(self.keys)}
        values = {f"values.{i}": v for i, v in enumerate(self.values)}
        heads = {f"head_valid.{i}": x for i, x in enumerate(self.head_valid)}
        return keys | values | heads | {"positions": self.positions, "valid": self.valid}

    def extend(
        self, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], positions: Tensor, valid: Tensor
    ) -> "KVCache":
        """Return the cache after a forward pass, from tensors that include the new slots, seen by every head."""
        new = valid.shape[1] - self.S
        heads = tuple(F.pad(x, (0, 0, 0, new), value=True) for x in self.head_valid)
        return KVCache(keys, values, positions, valid, heads)

    def append(self, other: "KVCache") -> "KVCache":
        """Append another cache's slots on the right, row by row.

        Raises:
            ValueError: The numbers of rows or layers differ.
        """
        if len(other.keys) != len(self.keys) or other.B != self.B:
            raise ValueError(
                f"append: {other.B} rows of {len(other.keys)} layers do not match {self.B} rows of {len(self.keys)}"
            )
        return KVCache(
            tuple(torch.cat(pair, 2) for pair in zip(self.keys, other.keys, strict=True)),
            tuple(torch.cat(pair, 2) for pair in zip(self.values, other.values, strict=True)),
            torch.cat([self.positions, other.positions], 1),
            torch.cat([self.valid, other.valid], 1),
            concat_head_valid((self, other), 2),
        )

    def crop(self, num_slots: int) -> "KVCache":
        """Keep the first `num_slots` slots.

        Raises:
            ValueError: The cache has fewer slots.
        """
        if not 0 <= num_slots <= self.S:
            raise ValueError(f"crop({num_slots}): the cache has {self.S} slots")
        return KVCache(
            tuple(k[:, :, :num_slots] for k in self.keys),
            tuple(v[:, :, :num_slots] for v in self.values),
            self.positions[:, :num_slots],
            self.valid[:, :num_slots],
            tuple(x[:, :, :num_slots] for x in self.head_valid),
        )

    def gather_slots(self, slots: Int[Tensor, "B K"]) -> "KVCache":
        """Select K slots per row, in the given order. Gradients flow to the selected slots.

        Args:
            slots: Slot indices [B, K], one list per row.

        Raises:
            ValueError: The shape does not match, or an index is out of range.
        """
        if slots.ndim != 2 or slots.shape[0] != self.B:
            raise ValueError(f"gather_slots: indices are {list(slots.shape)}; expected [{self.B}, K], one list per row")
        out_of_range = (slots < 0) | (slots >= self.S)
        if out_of_range.any():
            row, column = map(int, out_of_range.nonzero()[0])
            raise ValueError(f"gather_slots: slot {int(slots[row, column])} of {self.S} in row {row}")

        def gather(x: Tensor) -> Tensor:
            return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

        return KVCache(
            tuple(map(gather, self.keys)),
            tuple(map(gather, self.values)),
            self.positions.gather(1, slots),
            self.valid.gather(1, slots),
            tuple(map(gather, self.head_valid)),
        )

    def select_rows(self, rows: list[int] | Int[Tensor, " N"]) -> "KVCache":
        """Select rows; repeats are allowed.

        Raises:
            ValueError: A row is out of range.
        """
        index = torch.as_tensor(rows, dtype=torch.long, device=self.valid.device)
        out_of_range = index[(index < 0) | (index >= self.B)]
        if len(out_of_range):
            raise ValueError(f"select_rows: row {int(out_of_range[0])} of {self.B}")
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
        shape = caches[0].shape_summary
        other = next((c.shape_summary for c in caches if c.shape_summary != shape), None)
        if other:
            raise ValueError(f"concat_rows: (layers, KV heads, head size) {other} does not match {shape}")
        S = max(cache.S for cache in caches)
        padded = [cache.pad_left(S - cache.S) for cache in caches]
        return KVCache(
            tuple(torch.cat(layer, 0) for layer in zip(*(cache.keys for cache in padded), strict=True)),
            tuple(torch.cat(layer, 0) for layer in zip(*(cache.values for cache in padded), strict=True)),
            torch.cat([cache.positions for cache in padded], 0),
            torch.cat([cache.valid for cache in padded], 0),
            concat_head_valid(padded, 0),
        )

    def pad_left(self, num_slots: int) -> "KVCache":
        """Add invalid slots on the left."""

        def pad(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, num_slots, 0))

        return KVCache(
            tuple(map(pad, self.keys)),
            tuple(map(pad, self.values)),
            F.pad(self.positions, (num_slots, 0)),
            F.pad(self.valid, (num_slots, 0), value=False),
            tuple(map(pad, self.head_valid)),
        )

    def with_valid(self, valid: Bool[Tensor, "B S"]) -> "KVCache":
        """Replace the validity mask; positions stay.

        Raises:
            ValueError: The shapes differ.
        """
        if valid.shape != self.valid.shape:
            raise ValueError(f"valid is {list(valid.shape)}, the cache {list(self.valid.shape)}")
        return replace(self, valid=valid)

    def detach(self) -> "KVCache":
        """Detach every tensor from the graph."""
        return self.map_tensors(lambda x: x.detach())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "KVCache":
        """Move to a device, and convert keys and values to a dtype."""
        moved = self.map_tensors(lambda x: x.to(device))
        return replace(
            moved, keys=tuple(k.to(dtype) for k in moved.keys), values=tuple(v.to(dtype) for v in moved.values)
        )

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "KVCache":
        """Apply `function` to every tensor."""
        return KVCache(
            tuple(map(function, self.keys)),
            tuple(map(function, self.values)),
            function(self.positions),
            function(self.valid),
            tuple(map(function, self.head_valid)),
        )

    def equal(self, other: "KVCache") -> bool:
        """Return whether every tensor is bit-equal."""
        mine, theirs = self.tensors(), other.tensors()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    def save(self, path: str | Path, decoder: HasFingerprint) -> None:
        """Save to a safetensors file that only the same decoder can load."""
        tensors = {name: t.detach().contiguous() for name, t in self.tensors().items()}
        atomic.save_artifact(Path(path), tensors, "cache", {"model": decoder.fingerprint})

    @classmethod
    def load(cls, path: str | Path, decoder: HasFingerprint) -> "KVCache":
        """Load a file written by `save`.

        Raises:
            CorruptArtifactError: The file was changed, or belongs to other weights.
        """
        tensors, metadata = atomic.load_artifact(Path(path), "cache")
        model = metadata.get("model", "(none)")
        if model != decoder.fingerprint:
            raise CorruptArtifactError(f"{path} was written for weights {model}, this model is {decoder.fingerprint}")
        invalid = first_invalid_tensor(tensors)
        if invalid:
            raise CorruptArtifactError(f"{path}: tensor {invalid} is missing or has an unexpected shape or dtype")
        layers = range(sum(name.startswith("keys.") for name in tensors))
        return cls(
            tuple(tensors[f"keys.{i}"] for i in layers),
            tuple(tensors[f"values.{i}"] for i in layers),
            tensors["positions"],
            tensors["valid"],
            tuple(tensors[f"head_valid.{i}"] for i in layers if f"head_valid.{i}" in tensors),
        )


def concat_head_valid(caches: Sequence[KVCache], dim: int) -> tuple[Bool[Tensor, "B G S 1"], ...]:
    """Concatenate the `head_valid` of caches; a cache without one has heads that attend to all its slots."""
    if not any(cache.head_valid for cache in caches):
        return ()
    full = [c.head_valid or tuple(torch.ones_like(k[..., :1], dtype=torch.bool) for k in c.keys) for c in caches]
    return tuple(torch.cat(layer, dim) for layer in zip(*full, strict=True))


def first_invalid_tensor(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor that is missing, unexpected, or of another shape or dtype than a cache has."""
    layers = range(sum(name.startswith("keys.") for name in tensors))
    kinds = ("keys", "values", "head_valid") if "head_valid.0" in tensors else ("keys", "values")
    expected = {f"{kind}.{i}" for kind in kinds for i in layers} | {"positions", "valid"}
    unmatched = min(tensors.keys() ^ expected, default=None)
    if unmatched:
        return unmatched
    valid, shapes = tensors["valid"], {name: tuple(t.shape) for name, t in tensors.items()}
    if valid.ndim != 2 or valid.dtype != torch.bool:
        return "valid"
    if shapes["positions"] != shapes["valid"] or tensors["positions"].dtype != torch.long:
        return "positions"
    first = shapes["keys.0"] if layers else ()
    if layers and (len(first) != 4 or first[::2] != shapes["valid"]):
        return "keys.0"
    head = (*first[:3], 1)
    heads = {name for name in expected if name.startswith("head_valid.")}
    bad_head = next((name for name in heads if shapes[name] != head or tensors[name].dtype != torch.bool), None)
    return bad_head or next((name for name in expected - {"positions", "valid"} - heads if shapes[name] != first), None)
