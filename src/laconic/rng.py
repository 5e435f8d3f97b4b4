"""Counter-based random numbers and permutations: pure functions of their keys, without a stream to save.

The same on every release and machine. Keys are folded by the finaliser of SplitMix64 (Steele, Lea and Flood 2014,
doi:10.1145/2660193.2660195).
"""

from contextvars import ContextVar

import numpy as np
from numpy.typing import NDArray

Keys = int | NDArray[np.int64] | NDArray[np.uint64]
HashArray = NDArray[np.uint64]
FEISTEL_ROUNDS = 8
default_seed = ContextVar("default_seed", default=0)  # of latents; the run's seed while it builds a method of a user
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
SHIFT_30, SHIFT_27, SHIFT_31 = (np.uint64(n) for n in (30, 27, 31))
UINT64_MAX = 2**64 - 1


def hash64(*keys: Keys) -> HashArray:
    """Return 64 pseudorandom bits for each tuple of keys. Arrays broadcast; the order of keys matters."""
    state = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for key in keys:
            word = np.uint64(key & UINT64_MAX) if isinstance(key, int) else key.astype(np.uint64)
            z = (state ^ word) + GOLDEN
            z = (z ^ (z >> SHIFT_30)) * MULTIPLIER_1
            z = (z ^ (z >> SHIFT_27)) * MULTIPLIER_2
            state = z ^ (z >> SHIFT_31)
    return np.asarray(state)


def uniform(*keys: Keys) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each tuple of keys: the upper 53 bits of `hash64`."""
    return np.asarray((hash64(*keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def permuted_index(seed: int, epoch: Keys, position: Keys, num_rows: int) -> NDArray[np.int64]:
    """Return which row is at `position` of an epoch's order: a bijection on [0, num_rows).

    A Feistel network over the next even power of two, repeated until the result is in range (cycle walking).
    """
    if num_rows < 1:
        raise ValueError(f"num_rows={num_rows} must be at least 1")
    positions, epochs = np.broadcast_arrays(np.asarray(position, dtype=np.int64), np.asarray(epoch, dtype=np.int64))
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < num_rows:
        raise ValueError(f"position {int(positions.max())} is outside [0, {num_rows})")
    half = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    index = _feistel(np.atleast_1d(positions).astype(np.uint64), seed, epochs, half)
    while (too_large := index >= np.uint64(num_rows)).any():
        index = np.where(too_large, _feistel(index, seed, epochs, half), index)
    return index.astype(np.int64).reshape(positions.shape)


def permutation(num_rows: int, seed: int, epoch: int = 0, limit: int | None = None) -> list[int]:
    """Return the first `limit` row indices, by default all, of an epoch's order; the same ones every time."""
    n = num_rows if limit is None else min(limit, num_rows)
    return permuted_index(seed, epoch, np.arange(n), num_rows).tolist() if n else []


def _feistel(x: HashArray, seed: int, epoch: Keys, half: np.uint64) -> HashArray:
    """Permute 2·half-bit numbers by a Feistel network keyed by seed and epoch."""
    low = (np.uint64(1) << half) - np.uint64(1)
    left = x >> half
    right = x & low
    for round in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (hash64(seed, epoch, round, right) & low)
    return (left << half) | right
