"""Permute the vocabulary of a text again and again, so that a model has to keep learning while it reads."""

from collections.abc import Sequence

import numpy as np

from laconic import rng
from laconic.data.documents.tokenize import TokenArray


def permute_vocabulary(ids: TokenArray, interval: int, vocab_size: int, key: Sequence[int]) -> TokenArray:
    """Permute the ids below `vocab_size` with a new permutation every `interval` tokens; `key` is the document's."""
    permuted, vocabulary, seed = ids.copy(), np.arange(vocab_size), int(rng.hash64(*key).view(np.int64))
    for start in range(0, len(ids), interval):
        new_ids = rng.permuted_index(seed, start // interval, vocabulary, vocab_size)
        chunk = ids[start : start + interval]
        is_permuted = chunk < vocab_size
        permuted[start : start + interval] = np.where(is_permuted, new_ids[np.minimum(chunk, vocab_size - 1)], chunk)
    return permuted
