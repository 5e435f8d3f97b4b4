"""Multi-query associative recall (arXiv:2312.04927): pairs of key and value, then each key once more, for its value.

A document is its pairs one after another, then its queries in any order at drawn places; what is between is silence.
A value stands behind its query and is predicted there, and nothing else is scored. With keys and values of several
tokens, of which keys may share some, recall is fuzzy, like that of MAD (arXiv:2403.17844). Made when asked for.

Symbols: N pairs of a document, w tokens of a key and of a value.
"""

from collections.abc import Sequence

import numpy as np
import torch

from laconic import rng
from laconic.batches import DocumentBatch
from laconic.config.synthetic import MQARConfig
from laconic.data.synthetic.base import SPECIAL_TOKENS, IntArray, SyntheticDataset, build_word_tokenizer
from laconic.data.tokenizer import Tokenizer

MAX_SYMBOLS = 64  # keys and values there are words for; a task may use fewer
VOCABULARY = [
    *SPECIAL_TOKENS.values(),
    ".",
    *(f"k{i}" for i in range(MAX_SYMBOLS)),
    *(f"v{i}" for i in range(MAX_SYMBOLS)),
]
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}
COUNT_KEY, VALUE_KEY, POSITION_KEY, QUERY_ORDER_KEY = range(4)  # what is drawn


def build_mqar_tokenizer() -> Tokenizer:
    """132 words: keys k0…, values v0…, a dot for silence, and the special ones; words are parted by spaces."""
    return build_word_tokenizer(VOCABULARY)


class MQARDataset(SyntheticDataset[MQARConfig]):
    """The first `count` documents of a part (contract.Source), all of them one segment of T tokens."""

    vocabulary = VOCABULARY

    @property
    def max_length(self) -> int:
        """Tokens of a document."""
        return self.config.row_tokens

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """The documents of some places."""
        task, index = self.config, np.asarray(rows, dtype=np.int64)
        w, most, free = task.tokens_per_key, max(task.num_pairs), task.row_tokens // (2 * task.tokens_per_key)
        counts = np.asarray(task.num_pairs)[self.randint(len(task.num_pairs), index, COUNT_KEY, 1)[:, 0]]
        keys, values = (
            self.draw_keys(index, most),
            self.randint(task.num_values, index, VALUE_KEY, most * w).reshape(-1, most, w),
        )
        turns, places = self.uniform(index, QUERY_ORDER_KEY, most), self.uniform(index, POSITION_KEY, free)
        text = np.full((len(index), task.row_tokens), TOKEN_IDS["."], dtype=np.int64)
        scored = np.zeros(text.shape, dtype=bool)
        for b, N in enumerate(counts.tolist()):
            pairs = np.concatenate([TOKEN_IDS["k0"] + keys[b, :N], TOKEN_IDS["v0"] + values[b, :N]], 1)
            text[b, : 2 * w * N] = pairs.ravel()
            at = 2 * w * (N + places[b, : free - N].argsort()[:N])[:, None] + np.arange(2 * w)
            text[b, at], scored[b, at[:, w:]] = pairs[turns[b, :N].argsort()], True
        return DocumentBatch(
            torch.from_numpy(text), torch.ones(text.shape, dtype=torch.bool), torch.from_numpy(scored),
            (task.row_tokens,), torch.from_numpy(index), tuple(f"mqar-{self.part}-{i:06d}" for i in rows), epoch, step,
            num_facts=torch.from_numpy(counts),
        )  # fmt: skip

    def draw_keys(self, rows: IntArray, N: int) -> IntArray:
        """N keys that differ for each row, [n, N, w]."""
        number = rng.permuted_index(
            self.seed, rows[:, None], np.arange(N), self.config.num_keys**self.config.tokens_per_key
        )
        return np.stack(
            [number // self.config.num_keys**i % self.config.num_keys for i in range(self.config.tokens_per_key)], -1
        )
