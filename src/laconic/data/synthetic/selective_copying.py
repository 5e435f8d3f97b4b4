"""Selective copying (arXiv:2312.00752; as in MAD, arXiv:2403.17844): values among filler, to be repeated in order.

A document is N values at random positions with filler between them, then N markers. Each marker predicts the next
value; the values themselves are not in the input there. The vocabulary is that of MQAR.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.config.synthetic import SelectiveCopyingConfig
from laconic.data.synthetic.base import SyntheticDataset
from laconic.data.synthetic.mqar import TOKEN_IDS, VOCABULARY

COUNT_KEY, VALUE_KEY, POSITION_KEY = range(3)  # purposes of random numbers


class SelectiveCopyingDataset(SyntheticDataset):
    """Documents of one segment, with labels at the markers (batches.TrainingData)."""

    vocabulary = VOCABULARY
    config: SelectiveCopyingConfig

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        config = self.config
        index = np.asarray(rows, dtype=np.int64)
        T = config.row_tokens
        counts = self.choose(config.num_copied, index, COUNT_KEY)
        values = TOKEN_IDS["v0"] + self.randint(config.num_values, index, VALUE_KEY, max(config.num_copied))
        order = self.uniform(index, POSITION_KEY, T)
        input_ids = np.full((len(index), T), TOKEN_IDS["."], dtype=np.int64)
        labels = np.full(input_ids.shape, IGNORE_INDEX, dtype=np.int64)
        for b, N in enumerate(counts.tolist()):
            input_ids[b, np.sort(order[b, : T - N].argsort()[:N])] = values[b, :N]
            input_ids[b, -N:] = TOKEN_IDS["k0"]
            labels[b, -N:] = values[b, :N]
        batch = self.build_batch("copying", input_ids, np.ones(input_ids.shape, dtype=bool), index, epoch, step)
        return replace(batch, num_facts=torch.from_numpy(counts), labels=torch.from_numpy(labels))
