"""A text whose words change places: what a model knew of them is soon wrong, and has to be learned anew in reading."""

from collections.abc import Sequence

import numpy as np

from laconic.core import keyed
from laconic.data.encoding import Ids


def drifted(ids: Ids, every: int, words: int, key: Sequence[int]) -> Ids:
    """The ids below `words` permuted, by another permutation for each `every` tokens; `key` is of the document."""
    found, every_word, seed = ids.copy(), np.arange(words), int(keyed.mix(*key).view(np.int64))
    for at in range(0, len(ids), every):
        places = keyed.index(seed, at // every, every_word, words)
        stretch = ids[at : at + every]
        found[at : at + every] = np.where(stretch < words, places[np.minimum(stretch, words - 1)], stretch)
    return found
