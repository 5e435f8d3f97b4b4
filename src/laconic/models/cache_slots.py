"""KV cache as an immutable value: rotated keys and values of every layer, their positions, and which slots are valid.

This is what a decoder reads and extends; `models.cache` adds what else is done with a cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from laconic.models.config import DecoderConfig
from laconic.models.kv_prefix import KVPrefix

CacheT = TypeVar("CacheT", bound="CacheSlots")


def default_position_ids(
    attention_mask: Bool[Tensor, "B T"],
    past_positions: Int[Tensor, "B S"],
    past_valid: Bool[Tensor, "B S"],
    num_prefix_tokens: Int[Tensor, " B"] | None = None,
) -> Int[Tensor, "B T"]:
    """Eq. C22: count on from the largest valid cached position, or from the prefix, or from 0; padding gets 0."""
    first = 1 + F.pad(past_positions.masked_fill(~past_valid, -1), (1, 0), value=-1).amax(1)
    first = first if num_prefix_tokens is None else first.maximum(num_prefix_tokens)
    return (first[:, None] + attention_mask.cumsum(1) - 1) * attention_mask


@dataclass(frozen=True, eq=False)
class CacheSlots:
    """The tensors of a `KVCache`: keys and values [B, G, S, E] of every layer, and the position of each slot.

    A slot that is not valid (padding) is never attended to and does not count as a position. The slots come after the
    prefix.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: Int[Tensor, "B S"]
    valid: Bool[Tensor, "B S"]
    prefix: KVPrefix | None = None

    @classmethod
    def empty(
        cls: type[CacheT],
        config: DecoderConfig,
        B: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> CacheT:
        """Return a cache of B rows without slots, with keys and values of `dtype`.

        Passing it to a decoder of this configuration equals passing None.
        """
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
        """Number of slots, valid or not, after the prefix."""
        return self.valid.shape[1]

    def continue_positions(self, attention_mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Return the default positions of new tokens (Eq. C22); `attention_mask` is True at the real ones."""
        prefix_tokens = self.prefix and self.prefix.num_tokens
        return default_position_ids(attention_mask, self.positions, self.valid, prefix_tokens)

    @property
    def shape_summary(self) -> tuple[int, int, int]:
        """Number of layers, number of KV heads, head size."""
        return (len(self.keys), self.keys[0].shape[1], self.keys[0].shape[3]) if self.keys else (0, 0, 0)

    def check_fits(self, config: DecoderConfig, batch_size: int) -> None:
        """Raise ValueError unless a decoder of this `config` can read the cache with inputs of `batch_size` rows."""
        shape = self.shape_summary
        expected = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        if shape != expected:
            raise ValueError(f"the cache has (layers, KV heads, head size) {shape}, the decoder {expected}")
        if batch_size != self.B:
            raise ValueError(f"the cache has {self.B} rows, the inputs {batch_size}")

    def crop(self: CacheT, num_slots: int) -> CacheT:
        """Keep the oldest `num_slots` slots, and the prefix.

        Raises:
            ValueError: The cache has fewer slots.
        """
        if not 0 <= num_slots <= self.S:
            raise ValueError(f"crop({num_slots}): the cache has {self.S} slots")
        return self._map_slots(lambda x: x[:, :, :num_slots], lambda x: x[:, :num_slots])

    def _map_slots(self: CacheT, of_heads: Callable[[Tensor], Tensor], of_slots: Callable[[Tensor], Tensor]) -> CacheT:
        """Apply one function to keys and values [B, G, S, E] and another to positions and validity [B, S]."""
        keys, values = (tuple(map(of_heads, tensors)) for tensors in (self.keys, self.values))
        return type(self)(keys, values, of_slots(self.positions), of_slots(self.valid), self.prefix)
