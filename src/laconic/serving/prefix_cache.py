"""Keys and values of earlier sequences, so that a prompt which begins like one of them is not read from its start."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

from laconic.serving.ragged import CacheRow

MIN_SHARED_TOKENS = 16  # fewer are read again
MAX_ENTRIES = 256  # all are compared with every prompt


class CachedPrefix(NamedTuple):
    """Token ids, and a buffer of a `CacheRow` whose first slots hold their keys and values."""

    token_ids: npt.NDArray[np.int64]
    buffer: Float[Tensor, "2L G S E"]


class PrefixCache:
    """Prompts and answers of earlier sequences with their keys and values; the least recently used ones leave first.

    Nothing precedes the ids, so that a slot's position is its index. The buffers are shared with running rows, which
    write beyond the slots that are used here.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.entries: list[CachedPrefix] = []  # the most recently used one last

    def can_hold(self, token_ids: Sequence[int] | npt.NDArray[np.int64]) -> bool:
        """Return whether ids are enough to be kept, and there is a cache at all."""
        return self.max_bytes > 0 and len(token_ids) >= MIN_SHARED_TOKENS

    def find(self, token_ids: Sequence[int]) -> tuple[Float[Tensor, "2L G S E"] | None, int]:
        """Return the buffer that holds most of the first ids, and their number; None and 0 if no buffer has enough."""
        ids = np.asarray(token_ids, dtype=np.int64)
        shared = [count_shared(entry.token_ids, ids) for entry in self.entries]
        longest = max(shared, default=0)
        if longest < MIN_SHARED_TOKENS:
            return None, 0
        entry = self.entries.pop(shared.index(longest))
        self.entries.append(entry)
        return entry.buffer, longest

    def add(self, token_ids: Sequence[int], row: CacheRow) -> None:
        """Add the ids that a row has read, in place of entries that are their beginning."""
        n = row.num_filled
        ids = np.asarray(token_ids[:n], dtype=np.int64)
        shared = [count_shared(entry.token_ids, ids) for entry in self.entries]
        if not self.can_hold(ids) or n in shared:
            return
        capacity = row.buffer.shape[2]
        buffer = row.buffer[:, :, : n if 2 * n < capacity else capacity]
        if buffer.nbytes > self.max_bytes:
            return  # rather than in place of everything else
        self.entries = [x for x, s in zip(self.entries, shared, strict=True) if s < len(x.token_ids)]
        self.entries.append(CachedPrefix(ids, buffer.contiguous()))  # a copy if the row's buffer is half empty
        while len(self.entries) > MAX_ENTRIES or self.num_bytes > self.max_bytes:
            self.entries.pop(0)

    @property
    def num_bytes(self) -> int:
        return sum(entry.buffer.nbytes for entry in self.entries)


def count_shared(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> int:
    """Return the number of equal ids before the first difference."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
