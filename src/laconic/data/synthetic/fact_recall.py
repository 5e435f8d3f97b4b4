"""Fact recall: facts (a key and its value) among fillers, then queries for some of the keys.

Length and number of scored tokens do not depend on the number of facts, so all facts together are always worth
Q log(num_values) nats.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from laconic.batches import DocumentBatch
from laconic.config.data import FactRecallConfig
from laconic.data.synthetic.base import SPECIAL_TOKENS, IntArray, SyntheticDataset

MAX_KEYS, MAX_VALUES, MAX_FILLERS = (16, 16, 8)
VOCABULARY = [
    *SPECIAL_TOKENS.values(),
    *(f"x{i}" for i in range(MAX_FILLERS)),
    *(f"k{i}" for i in range(MAX_KEYS)),
    *(f"v{i}" for i in range(MAX_VALUES)),
    *(f"k{i}v{j}" for i in range(MAX_KEYS) for j in range(MAX_VALUES)),
]
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}
COUNT_KEY, ORDER_KEY, VALUE_KEY, POSITION_KEY, FILLER_KEY, QUERY_KEY = range(6)  # purposes of random numbers


class FactRecallDataset(SyntheticDataset):
    """Documents of fact segments and a last segment of Q pairs of key and value (batches.TrainingData)."""

    vocabulary = VOCABULARY
    config: FactRecallConfig

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        config = self.config
        index = np.asarray(rows, dtype=np.int64)
        counts = self.choose(config.num_facts, index, COUNT_KEY)
        keys = self.uniform(index, ORDER_KEY, config.num_keys).argsort(1)[:, : max(config.num_facts)]
        values = self.randint(config.num_values, index, VALUE_KEY, keys.shape[1])
        query = (self.uniform(index, QUERY_KEY, config.num_queries) * counts[:, None]).astype(np.int64)
        key_value = (TOKEN_IDS["k0"] + keys, TOKEN_IDS["v0"] + values)
        queries = np.stack([np.take_along_axis(ids, query, 1) for ids in key_value], 2).reshape(len(index), -1)
        input_ids = np.concatenate([self.place_facts(index, counts, keys, values), queries], 1)
        loss_mask = np.zeros(input_ids.shape, dtype=bool)
        loss_mask[:, -2 * config.num_queries + 1 :: 2] = True
        ends = tuple(config.segment_tokens * (i + 1) for i in range(config.num_segments))
        return replace(
            self.build_batch("recall", input_ids, loss_mask, index, epoch, step),
            segment_ends=(*ends, input_ids.shape[1]),
            windows=config.window_and_overlap,
            num_facts=torch.from_numpy(counts),
        )

    def place_facts(self, index: IntArray, counts: IntArray, keys: IntArray, values: IntArray) -> IntArray:
        """Return fillers with facts at random slots, [n, segments * length]; no fact crosses a segment border."""
        config = self.config
        width = 2 if config.two_token_facts else 1
        num_tokens = config.num_segments * config.segment_tokens
        ids = TOKEN_IDS["x0"] + self.randint(config.num_fillers, index, FILLER_KEY, num_tokens)
        slots = self.uniform(index, POSITION_KEY, num_tokens // width).argsort(1)[:, : keys.shape[1]] * width
        row, column = np.nonzero(np.arange(keys.shape[1]) < counts[:, None])
        position, key, value = slots[row, column], keys[row, column], values[row, column]
        if config.two_token_facts:
            ids[row, position], ids[row, position + 1] = TOKEN_IDS["k0"] + key, TOKEN_IDS["v0"] + value
        else:
            ids[row, position] = TOKEN_IDS["k0v0"] + key * MAX_VALUES + value
        return ids
