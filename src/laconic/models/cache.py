"""The cache as a value: keys after rotation and values of every layer, where they stand, and which are read.

Every operation gives a new value and leaves the old one as it was; gradients flow through all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.errors import CorruptArtifactError
from laconic.models.config import DecoderConfig
from laconic.storage import atomic


@runtime_checkable
class HasFingerprint(Protocol):
    """A decoder, as far as a saved cache must know it."""

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class KVCache:
    """What a decoder has read: per layer keys and values [B, G, S, E], positions [B, S], live [B, S].

    A slot that is not `live` is read by nothing and counts as no position; its content is never looked at.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: Int[Tensor, "B S"]
    valid: Bool[Tensor, "B S"]

    @classmethod
    def empty(
        cls, config: DecoderConfig, B: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "KVCache":
        """Nothing read: S = 0. Reading on it equals reading with `state=None`."""
        shape = (B, config.num_key_value_heads, 0, config.head_dim)
        nothing = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers))
        places = torch.empty(B, 0, dtype=torch.long, device=device)
        return cls(nothing, nothing, places, places.bool())

    @property
    def B(self) -> int:
        """Rows."""
        return self.valid.shape[0]

    @property
    def S(self) -> int:
        """Slots held, live or not."""
        return self.valid.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors: 2 L B G S E of the keys' type and 9 B S."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def shape_summary(self) -> tuple[int, int, int]:
        """Layers, heads of keys, and width of a head."""
        return (len(self.keys), self.keys[0].shape[1], self.keys[0].shape[3]) if self.keys else (0, 0, 0)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor under its name on disk."""
        layers = {f"keys.{i}": k for i, k in enumerate(self.keys)} | {
            f"values.{i}": v for i, v in enumerate(self.values)
        }
        return layers | {"positions": self.positions, "live": self.valid}

    def append(self, other: "KVCache") -> "KVCache":
        """The other's slots to the right of these, row by row."""
        if len(other.keys) != len(self.keys) or other.B != self.B:
            raise ValueError(f"append: {other.B} rows of {len(other.keys)} layers to {self.B} of {len(self.keys)}")
        return KVCache(
            tuple(torch.cat(pair, 2) for pair in zip(self.keys, other.keys, strict=True)),
            tuple(torch.cat(pair, 2) for pair in zip(self.values, other.values, strict=True)),
            torch.cat([self.positions, other.positions], 1),
            torch.cat([self.valid, other.valid], 1),
        )

    def crop(self, num_slots: int) -> "KVCache":
        """The first `n` slots."""
        if not 0 <= num_slots <= self.S:
            raise ValueError(f"crop({num_slots}): {self.S} slots are held")
        return KVCache(
            tuple(k[:, :, :num_slots] for k in self.keys),
            tuple(v[:, :, :num_slots] for v in self.values),
            self.positions[:, :num_slots],
            self.valid[:, :num_slots],
        )

    def gather_slots(self, slots: Int[Tensor, "B K"]) -> "KVCache":
        """The slots chosen for each row, in the order given; a gather, so gradients flow to what was kept."""
        if slots.ndim != 2:
            raise ValueError(f"keep: slots are {list(slots.shape)}; give one list a row, [B, K]")
        bad = (slots < 0) | (slots >= self.S)
        if slots.shape[0] != self.B:
            raise ValueError(f"keep: slots of {slots.shape[0]} rows, the cache has {self.B}")
        if bad.any():
            row, column = map(int, bad.nonzero()[0])
            raise ValueError(f"keep: slot {int(slots[row, column])} of {self.S} in row {row}")

        def chosen(x: Tensor) -> Tensor:
            return x.gather(2, slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

        return KVCache(
            tuple(map(chosen, self.keys)),
            tuple(map(chosen, self.values)),
            self.positions.gather(1, slots),
            self.valid.gather(1, slots),
        )

    def select_rows(self, rows: list[int] | Int[Tensor, " N"]) -> "KVCache":
        """The rows chosen; repeats are allowed."""
        at = torch.as_tensor(rows, dtype=torch.long, device=self.valid.device)
        bad = at[(at < 0) | (at >= self.B)]
        if len(bad):
            raise ValueError(f"take: row {int(bad[0])} of {self.B}")
        return self.map_tensors(lambda x: x.index_select(0, at))

    def repeat_rows(self, repeats: int) -> "KVCache":
        """Each row `n` times, side by side; of a single row a view, no copy."""
        if self.B == 1:
            return self.map_tensors(lambda x: x.expand(repeats, *x.shape[1:]))
        return self.map_tensors(lambda x: x.repeat_interleave(repeats, 0))

    @staticmethod
    def concat_rows(*caches: "KVCache") -> "KVCache":
        """The rows of all; shorter caches get dead slots on the left, as in a batch padded left."""
        if not caches:
            raise ValueError("join: no cache is given")
        (L, G, E), odd = (
            caches[0].shape_summary,
            next((c.shape_summary for c in caches if c.shape_summary != caches[0].shape_summary), None),
        )
        if odd:
            raise ValueError(f"join: {odd[0]} layers of {odd[1]} heads × {odd[2]} to {L} of {G} × {E}")
        S = max(cache.S for cache in caches)
        padded = [cache.pad_left(S - cache.S) for cache in caches]
        return KVCache(
            tuple(torch.cat(layer, 0) for layer in zip(*(cache.keys for cache in padded), strict=True)),
            tuple(torch.cat(layer, 0) for layer in zip(*(cache.values for cache in padded), strict=True)),
            torch.cat([cache.positions for cache in padded], 0),
            torch.cat([cache.valid for cache in padded], 0),
        )

    def pad_left(self, num_slots: int) -> "KVCache":
        """`n` dead slots on the left."""

        def pad(x: Tensor) -> Tensor:
            return torch.nn.functional.pad(x, (0, 0, num_slots, 0))

        left = (num_slots, 0)
        return KVCache(
            tuple(map(pad, self.keys)),
            tuple(map(pad, self.values)),
            torch.nn.functional.pad(self.positions, left),
            torch.nn.functional.pad(self.valid, left, value=False),
        )

    def with_valid(self, valid: Bool[Tensor, "B S"]) -> "KVCache":
        """The same slots, others switched off; positions stay."""
        if valid.shape != self.valid.shape:
            raise ValueError(f"live is {list(valid.shape)}, the cache holds {list(self.valid.shape)}")
        return replace(self, valid=valid)

    def detach(self) -> "KVCache":
        """The same numbers, cut from the graph."""
        return self.map_tensors(lambda x: x.detach())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "KVCache":
        """Elsewhere, or with keys and values of another type; positions and `live` keep theirs."""
        moved = self.map_tensors(lambda x: x.to(device))
        return replace(
            moved, keys=tuple(k.to(dtype) for k in moved.keys), values=tuple(v.to(dtype) for v in moved.values)
        )

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "KVCache":
        """`function` of every tensor."""
        return KVCache(
            tuple(map(function, self.keys)),
            tuple(map(function, self.values)),
            function(self.positions),
            function(self.valid),
        )

    def equal(self, other: "KVCache") -> bool:
        """Whether every tensor is bit-equal."""
        mine, theirs = self.tensors(), other.tensors()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    def save(self, path: str | Path, decoder: HasFingerprint) -> None:
        """One safetensors file that only the decoder which read it may open."""
        tensors = {name: t.detach().contiguous() for name, t in self.tensors().items()}
        atomic.save_artifact(Path(path), tensors, "cache", {"model": decoder.fingerprint})

    @classmethod
    def load(cls, path: str | Path, decoder: HasFingerprint) -> "KVCache":
        """What `save` wrote. Raises `Damaged` for a file that was changed or belongs to another decoder."""
        tensors, about = atomic.load_artifact(Path(path), "cache")
        model = about.get("model", "of no name")
        if model != decoder.fingerprint:
            raise CorruptArtifactError(f"{path} was written for weights {model}, this model is {decoder.fingerprint}")
        odd = first_invalid_tensor(tensors)
        if odd:
            raise CorruptArtifactError(f"{path}: {odd} is missing or does not fit a cache; take another copy")
        layers = range((len(tensors) - 2) // 2)
        return cls(
            tuple(tensors[f"keys.{i}"] for i in layers),
            tuple(tensors[f"values.{i}"] for i in layers),
            tensors["positions"],
            tensors["live"],
        )


def first_invalid_tensor(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of a tensor that a saved cache must have and has not, or has and must not, or of another shape."""
    layers = range(sum(name.startswith("keys.") for name in tensors))
    asked = {f"{what}.{i}" for what in ("keys", "values") for i in layers} | {"positions", "live"}
    odd = min(tensors.keys() ^ asked, default=None)
    if odd:
        return odd
    live, shapes = tensors["live"], {name: tuple(t.shape) for name, t in tensors.items()}
    if live.ndim != 2 or live.dtype != torch.bool:
        return "live"
    if shapes["positions"] != shapes["live"] or tensors["positions"].dtype != torch.long:
        return "positions"
    first = shapes["keys.0"] if layers else ()
    if layers and (len(first) != 4 or first[::2] != shapes["live"]):
        return "keys.0"
    return next((name for name in asked - {"positions", "live"} if shapes[name] != first), None)
