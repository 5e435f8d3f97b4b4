"""Multi-query associative recall (arXiv:2312.04927): pairs of key and value, then each key once more, for its value.

A document is its pairs one after another, then its queries in any order at drawn places; what is between is silence.
A value stands behind its query and is predicted there, and nothing else is scored. With keys and values of several
tokens, of which keys may share some, recall is fuzzy, like that of MAD (arXiv:2403.17844). Made when asked for.

Symbols: N pairs of a document, w tokens of a key and of a value.
"""

from collections.abc import Sequence

import numpy as np
import torch

from laconic.core import keyed
from laconic.core.contract import Documents
from laconic.data.drawn import SPECIAL, Drawn, Ints, word_tokenizer
from laconic.data.task_settings import Pairs
from laconic.data.tokens import Tokenizer

MOST = 64  # keys and values there are words for; a task may use fewer
WORDS = [*SPECIAL.values(), ".", *(f"k{i}" for i in range(MOST)), *(f"v{i}" for i in range(MOST))]
ID = {word: i for i, word in enumerate(WORDS)}
COUNT, VALUE, PLACE, TURN = range(4)  # what is drawn


def mqar_tokenizer() -> Tokenizer:
    """132 words: keys k0…, values v0…, a dot for silence, and the special ones; words are parted by spaces."""
    return word_tokenizer(WORDS)


class Mqar(Drawn[Pairs]):
    """The first `count` documents of a part (contract.Source), all of them one segment of T tokens."""

    words = WORDS

    @property
    def longest(self) -> int:
        """Tokens of a document."""
        return self.task.length

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Documents:
        """The documents of some places."""
        task, index = self.task, np.asarray(rows, dtype=np.int64)
        w, most, free = task.words, max(task.pairs), task.length // (2 * task.words)
        counts = np.asarray(task.pairs)[self.below(len(task.pairs), index, COUNT, 1)[:, 0]]
        keys, values = self.keys(index, most), self.below(task.values, index, VALUE, most * w).reshape(-1, most, w)
        turns, places = self.drawn(index, TURN, most), self.drawn(index, PLACE, free)
        text = np.full((len(index), task.length), ID["."], dtype=np.int64)
        scored = np.zeros(text.shape, dtype=bool)
        for b, N in enumerate(counts.tolist()):
            pairs = np.concatenate([ID["k0"] + keys[b, :N], ID["v0"] + values[b, :N]], 1)
            text[b, : 2 * w * N] = pairs.ravel()
            at = 2 * w * (N + places[b, : free - N].argsort()[:N])[:, None] + np.arange(2 * w)
            text[b, at], scored[b, at[:, w:]] = pairs[turns[b, :N].argsort()], True
        return Documents(
            torch.from_numpy(text), torch.ones(text.shape, dtype=torch.bool), torch.from_numpy(scored),
            (task.length,), torch.from_numpy(index), tuple(f"mqar-{self.part}-{i:06d}" for i in rows), epoch, step,
            facts=torch.from_numpy(counts),
        )  # fmt: skip

    def keys(self, rows: Ints, N: int) -> Ints:
        """N keys that differ for each row, [n, N, w]."""
        number = keyed.index(self.seed, rows[:, None], np.arange(N), self.task.keys**self.task.words)
        return np.stack([number // self.task.keys**i % self.task.keys for i in range(self.task.words)], -1)
