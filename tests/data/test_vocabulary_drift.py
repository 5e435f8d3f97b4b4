"""Vocabulary drift: a new permutation per interval, the same ones for the same key."""

from itertools import pairwise

import numpy as np

from laconic.data.documents.dataset import permute_vocabulary


def test_permute_vocabulary_uses_a_new_map_per_interval() -> None:
    ids = np.array([(7 * i * i + i) % 16 for i in range(95)], dtype=np.int32)
    permuted = permute_vocabulary(ids, 30, 16, (0, 1, 2))
    maps: list[dict[int, int]] = []
    for at in range(0, 95, 30):
        pairs = set(zip(ids[at : at + 30].tolist(), permuted[at : at + 30].tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})  # a map, and back
        maps.append(dict(pairs))
    assert all(any(one[a] != two[a] for a in one.keys() & two.keys()) for one, two in pairwise(maps))
    assert permuted.dtype == ids.dtype


def test_permute_vocabulary_keeps_other_ids() -> None:
    ids = np.arange(20, dtype=np.int32)
    one, two = permute_vocabulary(ids, 20, 12, (0, 0, 0)), permute_vocabulary(ids, 20, 12, (0, 0, 1))
    assert one[12:].tolist() == list(range(12, 20))
    assert sorted(one[:12].tolist()) == list(range(12))
    assert one.tolist() != two.tolist()
    assert one.tolist() == permute_vocabulary(ids, 20, 12, (0, 0, 0)).tolist()
