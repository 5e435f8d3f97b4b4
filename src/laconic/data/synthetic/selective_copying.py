"""Selective copying (arXiv:2312.00752; like MAD's, arXiv:2403.17844): values among silence, all said again in order.

A document is N values at drawn places, silence between them, and then N markers; what each marker predicts is the next
of the values, which themselves do not stand there again. Words are those of `mqar`. Made when asked for.
"""

from collections.abc import Sequence

import numpy as np
import torch

from laconic.batches import IGNORE_INDEX, DocumentBatch
from laconic.config.synthetic import SelectiveCopyingConfig
from laconic.data.synthetic.base import SyntheticDataset
from laconic.data.synthetic.mqar import TOKEN_IDS, VOCABULARY

COUNT_KEY, VALUE_KEY, POSITION_KEY = range(3)  # what is drawn


class SelectiveCopyingDataset(SyntheticDataset[SelectiveCopyingConfig]):
    """Documents of T tokens, all of them one segment (contract.Source), with labels at the markers."""

    vocabulary = VOCABULARY

    @property
    def max_length(self) -> int:
        """Tokens of a document."""
        return self.config.row_tokens

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> DocumentBatch:
        """The documents of some places."""
        task, index = self.config, np.asarray(rows, dtype=np.int64)
        counts = np.asarray(task.num_copied)[self.randint(len(task.num_copied), index, COUNT_KEY, 1)[:, 0]]
        values = TOKEN_IDS["v0"] + self.randint(task.num_values, index, VALUE_KEY, max(task.num_copied))
        order = self.uniform(index, POSITION_KEY, task.row_tokens)
        text = np.full((len(index), task.row_tokens), TOKEN_IDS["."], dtype=np.int64)
        labels = np.full(text.shape, IGNORE_INDEX, dtype=np.int64)
        for b, N in enumerate(counts.tolist()):
            text[b, np.sort(order[b, : task.row_tokens - N].argsort()[:N])] = values[b, :N]
            text[b, -N:], labels[b, -N:] = TOKEN_IDS["k0"], values[b, :N]
        live = torch.ones(text.shape, dtype=torch.bool)
        return DocumentBatch(
            torch.from_numpy(text), live, live.clone(), (task.row_tokens,), torch.from_numpy(index),
            tuple(f"copying-{self.part}-{i:06d}" for i in rows), epoch, step,
            num_facts=torch.from_numpy(counts), labels=torch.from_numpy(labels),
        )  # fmt: skip
