"""Draws and orders as pure functions of their keys: no stream, nothing to save, the same on every release and machine.

Keys are folded by the finaliser of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195).
"""

import numpy as np
from numpy.typing import NDArray

Keys = int | NDArray[np.int64] | NDArray[np.uint64]
HashArray = NDArray[np.uint64]
FEISTEL_ROUNDS = 8  # of the Feistel network
GOLDEN, MULTIPLIER_1, MULTIPLIER_2 = (
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
SHIFT_30, SHIFT_27, SHIFT_31 = (np.uint64(n) for n in (30, 27, 31))
UINT64_MAX = 2**64 - 1


def hash64(*keys: Keys) -> HashArray:
    """64 random-looking bits for each tuple of keys; arrays broadcast. The order of keys matters."""
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
    """A number in [0, 1) for each tuple of keys: the upper 53 bits of `mix`."""
    return np.asarray((hash64(*keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def permuted_index(seed: int, epoch: Keys, position: Keys, num_rows: int) -> NDArray[np.int64]:
    """Which of `n` rows stands at place `i` of an epoch: a bijection on [0, n) (Feistel network, cycle-walking)."""
    if num_rows < 1:
        raise ValueError(f"index: an order of {num_rows} rows; give at least one")
    places, epochs = np.broadcast_arrays(np.asarray(position, dtype=np.int64), np.asarray(epoch, dtype=np.int64))
    if places.size and not 0 <= int(places.min()) <= int(places.max()) < num_rows:
        raise ValueError(f"index: place {int(places.max())} of {num_rows} rows")
    half = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    found = _feistel(np.atleast_1d(places).astype(np.uint64), seed, epochs, half)
    while (out := found >= np.uint64(num_rows)).any():
        found = np.where(out, _feistel(found, seed, epochs, half), found)
    return found.astype(np.int64).reshape(places.shape)


def _feistel(x: HashArray, seed: int, epoch: Keys, half: np.uint64) -> HashArray:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & low
    for round in range(FEISTEL_ROUNDS):
        left, right = right, left ^ (hash64(seed, epoch, round, right) & low)
    return (left << half) | right
