"""KV prefix: keys and values before the slots of a cache; their number differs between KV heads.

A memory that keeps many keys in a few heads takes as many bytes as these keys and values; nothing is padded to the
longest head.

Shapes: B rows, G KV heads, N keys of all heads of a layer, n keys of one head, E head size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laconic.models.attention import AttentionBackend


class PrefixHead(NamedTuple):
    """The prefix of one KV head: rotated keys, values, and which keys a row has (None: all).

    `attend` is the attention from the head's queries to its prefix and slots, in place of the decoder's backend.
    """

    keys: Float[Tensor, "B n E"]
    values: Float[Tensor, "B n E"]
    valid: Bool[Tensor, "B n"] | None
    attend: AttentionBackend | None = None


@dataclass(frozen=True, eq=False)
class KVPrefix:
    """Immutable keys and values of each layer that every query attends to, even beyond a sliding window."""

    keys: tuple[Float[Tensor, "B _ E"], ...]  # rotated keys of all KV heads side by side
    values: tuple[Float[Tensor, "B _ E"], ...]
    valid: tuple[Bool[Tensor, "B _"], ...]  # True at the keys that a row has; empty if every row has all of them
    num_tokens: Int[Tensor, " B"]  # tokens that the prefix was computed from; the next token has this position
    sizes: tuple[tuple[int, ...], ...]  # number of keys of every head, padded to the longest row

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def heads(self, layer: int) -> list[PrefixHead]:
        """Return the heads of a layer, as views."""
        sizes = list(self.sizes[layer])
        keys = torch.split(self.keys[layer], sizes, 1)
        values = torch.split(self.values[layer], sizes, 1)
        valid = torch.split(self.valid[layer], sizes, 1) if self.valid else [None] * len(sizes)
        return [PrefixHead(*head) for head in zip(keys, values, valid, strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its name in a saved cache."""
        layers = {"keys": self.keys, "values": self.values, "valid": self.valid}
        named = {f"prefix_{kind}.{i}": x for kind, tensors in layers.items() for i, x in enumerate(tensors)}
        sizes = torch.tensor(self.sizes, dtype=torch.long, device="cpu")
        return named | {"prefix_tokens": self.num_tokens, "prefix_sizes": sizes}

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "KVPrefix":
        keys, values, valid = (tuple(map(function, x)) for x in (self.keys, self.values, self.valid))
        return KVPrefix(keys, values, valid, function(self.num_tokens), self.sizes)

    @classmethod
    def empty(cls, like: "KVPrefix", B: int) -> "KVPrefix":
        """Return B rows without keys, for a model with the layers and heads of another prefix."""
        keys = tuple(k.new_empty(B, 0, k.shape[2]) for k in like.keys)
        sizes = tuple((0,) * len(layer) for layer in like.sizes)
        return cls(keys, keys, (), like.num_tokens.new_zeros(B), sizes)

    @staticmethod
    def concat_rows(prefixes: Sequence["KVPrefix"]) -> "KVPrefix":
        """Concatenate rows. Every head is padded to its longest row."""
        sizes = tuple(
            tuple(map(max, zip(*layers, strict=True))) for layers in zip(*(p.sizes for p in prefixes), strict=True)
        )
        layers = list[list[Tensor]]()
        for layer, longest in enumerate(sizes):
            rows = [p.pad_heads(layer, longest) for p in prefixes]
            layers.append([torch.cat(parts) for parts in zip(*rows, strict=True)])
        keys, values, valid = zip(*layers, strict=True)
        is_padded = not all(bool(v.all()) for v in valid)
        tokens = torch.cat([prefix.num_tokens for prefix in prefixes])
        return KVPrefix(keys, values, valid if is_padded else (), tokens, sizes)

    def pad_heads(self, layer: int, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and validity of a layer, its heads padded to these sizes, side by side."""
        padded = list[tuple[Tensor, Tensor, Tensor]]()
        for head, size in zip(self.heads(layer), sizes, strict=True):
            num_added = size - head.keys.shape[1]
            is_real = torch.ones_like(head.keys[..., 0], dtype=torch.bool) if head.valid is None else head.valid
            keys, values = (F.pad(x, (0, 0, 0, num_added)) for x in (head.keys, head.values))
            padded.append((keys, values, F.pad(is_real, (0, num_added))))
        keys, values, valid = (torch.cat(parts, 1) for parts in zip(*padded, strict=True))
        return keys, values, valid

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "KVPrefix | None":
        """Return the prefix of a saved cache, None if it has none."""
        if "prefix_sizes" not in tensors:
            return None
        sizes = tuple(tuple(map(int, layer)) for layer in tensors["prefix_sizes"])
        keys, values, valid = (
            tuple(tensors[f"prefix_{kind}.{i}"] for i in range(len(sizes)) if f"prefix_{kind}.0" in tensors)
            for kind in ("keys", "values", "valid")
        )
        return cls(keys, values, valid, tensors["prefix_tokens"], sizes)
