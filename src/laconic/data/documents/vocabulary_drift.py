"""A text whose words change places: what a model knew of them is soon wrong, and has to be learned anew in reading."""

from collections.abc import Sequence

import numpy as np

from laconic import rng
from laconic.data.documents.tokenize import TokenArray


def permute_vocabulary(ids: TokenArray, interval: int, vocab_size: int, key: Sequence[int]) -> TokenArray:
    """The ids below `words` permuted, by another permutation for each `every` tokens; `key` is of the document."""
    found, every_word, seed = ids.copy(), np.arange(vocab_size), int(rng.hash64(*key).view(np.int64))
    for at in range(0, len(ids), interval):
        places = rng.permuted_index(seed, at // interval, every_word, vocab_size)
        stretch = ids[at : at + interval]
        found[at : at + interval] = np.where(stretch < vocab_size, places[np.minimum(stretch, vocab_size - 1)], stretch)
    return found
