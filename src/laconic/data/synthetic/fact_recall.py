"""The recall task: a document is facts among fillers, then queries; a fact pairs a key with a value.

Length and number of scored tokens are the same however many facts there are, so that what is at stake is shared by
fewer or more of them: Q log(values) nats in all. Made by arithmetic when asked for, each document from its place.
"""

from collections.abc import Sequence

import numpy as np
import torch

from laconic.batches import DocumentBatch
from laconic.config.data import FactRecallConfig
from laconic.data.synthetic.base import SPECIAL_TOKENS, IntArray, SyntheticDataset, build_word_tokenizer
from laconic.data.tokenizer import Tokenizer

MAX_KEYS, MAX_VALUES, MAX_FILLERS = (16, 16, 8)  # words there are for; a task may use fewer
VOCABULARY = [
    *SPECIAL_TOKENS.values(),
    *(f"x{i}" for i in range(MAX_FILLERS)),
    *(f"k{i}" for i in range(MAX_KEYS)),
    *(f"v{i}" for i in range(MAX_VALUES)),
    *(f"k{i}v{j}" for i in range(MAX_KEYS) for j in range(MAX_VALUES)),
]
TOKEN_IDS = {word: i for i, word in enumerate(VOCABULARY)}
COUNT_KEY, ORDER_KEY, VALUE_KEY, POSITION_KEY, FILLER_KEY, QUERY_KEY = range(6)  # what is drawn


def build_recall_tokenizer() -> Tokenizer:
    """299 words: fillers x0…, keys k0…, values v0…, facts k0v0…, and the special ones; words are parted by spaces."""
    return build_word_tokenizer(VOCABULARY)


class FactRecallDataset(SyntheticDataset[FactRecallConfig]):
    """The first `count` documents of a part (contract.Source): segments of facts, and one of Q times key and value."""

    vocabulary = VOCABULARY

    @property
    def max_length(self) -> int:
        """Tokens of a document."""
        return self.config.segment_tokens * self.config.num_segments + 2 * self.config.num_queries

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """The documents of some places."""
        task, index = self.config, np.asarray(rows, dtype=np.int64)
        counts = np.asarray(task.num_facts)[self.randint(len(task.num_facts), index, COUNT_KEY, 1)[:, 0]]
        keys = self.uniform(index, ORDER_KEY, task.num_keys).argsort(1)[:, : max(task.num_facts)]
        values = self.randint(task.num_values, index, VALUE_KEY, keys.shape[1])
        ask = (self.uniform(index, QUERY_KEY, task.num_queries) * counts[:, None]).astype(np.int64)
        asked = np.stack(
            [np.take_along_axis(part, ask, 1) for part in (TOKEN_IDS["k0"] + keys, TOKEN_IDS["v0"] + values)], 2
        )
        text = np.concatenate([self.place_facts(index, counts, keys, values), asked.reshape(len(index), -1)], 1)
        scored = np.zeros(text.shape, dtype=bool)
        scored[:, -2 * task.num_queries + 1 :: 2] = True
        cuts = tuple(task.segment_tokens * (i + 1) for i in range(task.num_segments))
        return DocumentBatch(
            torch.from_numpy(text), torch.ones(text.shape, dtype=torch.bool), torch.from_numpy(scored),
            (*cuts, text.shape[1]), torch.from_numpy(index), tuple(f"recall-{self.part}-{i:06d}" for i in rows),
            epoch, step, windows=task.window_and_overlap, num_facts=torch.from_numpy(counts),
        )  # fmt: skip

    def place_facts(self, index: IntArray, counts: IntArray, keys: IntArray, values: IntArray) -> IntArray:
        """Fillers with facts at random places, [n, segments * length]; a fact of two tokens stays in its segment."""
        task, width = self.config, 2 if self.config.two_token_facts else 1
        text = TOKEN_IDS["x0"] + self.randint(
            task.num_fillers, index, FILLER_KEY, task.num_segments * task.segment_tokens
        )
        places = self.uniform(index, POSITION_KEY, text.shape[1] // width).argsort(1)[:, : keys.shape[1]] * width
        row, column = np.nonzero(np.arange(keys.shape[1]) < counts[:, None])
        at, key, value = places[row, column], keys[row, column], values[row, column]
        if task.two_token_facts:
            text[row, at], text[row, at + 1] = TOKEN_IDS["k0"] + key, TOKEN_IDS["v0"] + value
        else:
            text[row, at] = TOKEN_IDS["k0v0"] + key * MAX_VALUES + value
        return text
