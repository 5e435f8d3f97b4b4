"""rng: golden values, agreement with Python integers, bijections, statistics."""

import numpy as np
import pytest

from laconic import rng

WORD = 2**64 - 1


def hash64_in_python(*keys: int) -> int:
    """SplitMix64's finaliser over Python's integers."""
    state = 0
    for key in keys:
        z = ((state ^ (key & WORD)) + 0x9E3779B97F4A7C15) & WORD
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        state = z ^ (z >> 31)
    return state


def permuted_index_in_python(seed: int, epoch: int, i: int, n: int) -> int:
    """Eight Feistel rounds over the smallest even number of bits that holds n - 1, repeated until in range."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = 2**half - 1
    while True:
        left, right = i >> half, i & low
        for round in range(8):
            left, right = right, left ^ (hash64_in_python(seed, epoch, round, right) & low)
        i = left << half | right
        if i < n:
            return i


def test_rng_golden_values() -> None:
    """The first is SplitMix64's first output from seed 0."""
    keys = ((0,), (1,), (1, 2), (2, 1), (-1, 3))
    golden = [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0xBCD9DBB49673066B, 0xE06DD043328BD285, 0x2E9F42F99DC9983]
    assert [int(rng.hash64(*key)) for key in keys] == golden
    assert float(rng.uniform(1, 2, 3)) == 0.814259011529328
    assert rng.permuted_index(5, 0, np.arange(10), 10).tolist() == [5, 9, 3, 8, 2, 0, 4, 1, 6, 7]
    assert rng.permuted_index(5, 1, np.arange(10), 10).tolist() == [4, 5, 9, 0, 6, 2, 3, 1, 8, 7]
    assert rng.permuted_index(0, 0, np.array([0, 1, 999_999]), 1_000_000).tolist() == [195592, 803304, 227820]
    assert int(rng.permuted_index(7, 3, 2**40, 2**41)) == 1791089761592


def test_rng_equals_python_integers() -> None:
    for keys in ((3,), (2**63 - 1, -5), (0, 0, 0, 7)):
        assert int(rng.hash64(*keys)) == hash64_in_python(*keys)
    for n in (1, 2, 3, 17, 1000, 2**33 + 5):
        for i in {0, n // 2, n - 1}:
            assert int(rng.permuted_index(9, 4, i, n)) == permuted_index_in_python(9, 4, i, n)


def test_rng_broadcasts_over_arrays() -> None:
    rows = np.arange(6).reshape(2, 3)
    assert rng.hash64(4, rows, 1).tolist() == [[int(rng.hash64(4, int(i), 1)) for i in row] for row in rows]
    assert rng.permuted_index(1, 2, rows, 6).tolist() == [
        [int(rng.permuted_index(1, 2, int(i), 6)) for i in row] for row in rows
    ]
    expected = [[int(rng.permuted_index(1, epoch, i, 6)) for i in range(6)] for epoch in (4, 9)]
    assert rng.permuted_index(1, np.array([[4], [9]]), np.arange(6), 6).tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000])
def test_permuted_index_is_a_bijection(n: int) -> None:
    orders = {
        tuple(rng.permuted_index(seed, epoch, np.arange(n), n).tolist()) for seed in range(3) for epoch in range(3)
    }
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert len(orders) == 9 or n < 7


def test_permutations_and_uniforms_look_random() -> None:
    n = 1000
    orders = np.stack([rng.permuted_index(0, epoch, np.arange(n), n) for epoch in range(200)])
    assert abs(orders.mean(0) - (n - 1) / 2).max() < 5 * n / (12 * 200) ** 0.5
    fixed = (orders == np.arange(n)).sum(1)  # Poisson distributed with mean 1
    assert 0.7 < fixed.mean() < 1.3
    draws = rng.uniform(1, np.arange(100_000))
    assert 0 <= draws.min() <= draws.max() < 1
    counts = np.histogram(draws, 100, (0, 1))[0]
    assert (
        (counts - 1000) ** 2 / 1000
    ).sum() < 160  # chi squared with 99 degrees of freedom; exceeded with probability 1e-4


def test_permutation_is_the_beginning_of_an_order() -> None:
    order = rng.permuted_index(3, 5, np.arange(9), 9).tolist()
    assert rng.permutation(9, 3, 5) == rng.permutation(9, 3, 5, limit=20) == order
    assert rng.permutation(9, 3, 5, limit=4) == order[:4]
    assert rng.permutation(0, 3) == []


def test_permuted_index_refuses_positions_out_of_range() -> None:
    with pytest.raises(ValueError, match="num_rows=0"):
        rng.permuted_index(0, 0, 0, 0)
    for i in (-1, 5):
        with pytest.raises(ValueError, match="outside"):
            rng.permuted_index(0, 0, i, 5)
