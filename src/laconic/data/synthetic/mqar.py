"""Multi-query associative recall, MQAR (arXiv:2312.04927): key-value pairs, then each key again, to recall its value.

A document is its pairs, then its queries in random order at random positions with filler between them. Only the value
after each query is scored. With keys and values of several tokens, where keys may share tokens, recall is fuzzy, as in
MAD (arXiv:2403.17844).

Symbols: N pairs of a document, w tokens of a key and of a value.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from laconic import rng
from laconic.batches import DocumentBatch
from laconic.config.synthetic import MQARConfig
from laconic.data.synthetic.base import SPECIAL_TOKENS, IntArray, SyntheticDataset

MAX_SYMBOLS = 64  # keys, and values
VOCABULARY = [
    *SPECIAL_TOKENS.values(),
    ".",
    *(f"k{i}" for i in range(MAX_SYMBOLS)),
    *(f"v{i}" for i in range(MAX_SYMBOLS)),
]
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}
COUNT_KEY, VALUE_KEY, POSITION_KEY, QUERY_ORDER_KEY = range(4)  # purposes of random numbers


class MQARDataset(SyntheticDataset):
    """Documents of one segment (batches.TrainingData)."""

    vocabulary = VOCABULARY
    config: MQARConfig

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        config = self.config
        index = np.asarray(rows, dtype=np.int64)
        w = config.tokens_per_key
        max_pairs = max(config.num_pairs)
        counts = self.choose(config.num_pairs, index, COUNT_KEY)
        keys = self.draw_keys(index, max_pairs)
        values = self.randint(config.num_values, index, VALUE_KEY, max_pairs * w).reshape(-1, max_pairs, w)
        num_slots = config.row_tokens // (2 * w)
        query_order = self.uniform(index, QUERY_ORDER_KEY, max_pairs)
        slot_order = self.uniform(index, POSITION_KEY, num_slots)
        input_ids = np.full((len(index), config.row_tokens), TOKEN_IDS["."], dtype=np.int64)
        loss_mask = np.zeros(input_ids.shape, dtype=bool)
        for b, N in enumerate(counts.tolist()):
            pairs = np.concatenate([TOKEN_IDS["k0"] + keys[b, :N], TOKEN_IDS["v0"] + values[b, :N]], 1)
            input_ids[b, : 2 * w * N] = pairs.ravel()
            columns = 2 * w * (N + slot_order[b, : num_slots - N].argsort()[:N])[:, None] + np.arange(2 * w)
            input_ids[b, columns] = pairs[query_order[b, :N].argsort()]
            loss_mask[b, columns[:, w:]] = True
        batch = self.build_batch("mqar", input_ids, loss_mask, index, epoch, step)
        return replace(batch, num_facts=torch.from_numpy(counts))

    def draw_keys(self, rows: IntArray, N: int) -> IntArray:
        """Return N different keys for each row, [n, N, w]."""
        num_keys, w = self.config.num_keys, self.config.tokens_per_key
        number = rng.permuted_index(self.seed, rows[:, None], np.arange(N), num_keys**w)
        return np.stack([number // num_keys**i % num_keys for i in range(w)], -1)
