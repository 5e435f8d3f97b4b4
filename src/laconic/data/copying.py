"""Selective copying (arXiv:2312.00752; like MAD's, arXiv:2403.17844): values among silence, all said again in order.

A document is N values at drawn places, silence between them, and then N markers; what each marker predicts is the next
of the values, which themselves do not stand there again. Words are those of `mqar`. Made when asked for.
"""

from collections.abc import Sequence

import numpy as np
import torch

from laconic.core.contract import UNSCORED, Documents
from laconic.data.drawn import Drawn
from laconic.data.mqar import ID, WORDS
from laconic.data.task_settings import Copying

COUNT, VALUE, PLACE = range(3)  # what is drawn


class Copies(Drawn[Copying]):
    """Documents of T tokens, all of them one segment (contract.Source), with labels at the markers."""

    words = WORDS

    @property
    def longest(self) -> int:
        """Tokens of a document."""
        return self.task.length

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Documents:
        """The documents of some places."""
        task, index = self.task, np.asarray(rows, dtype=np.int64)
        counts = np.asarray(task.counts)[self.below(len(task.counts), index, COUNT, 1)[:, 0]]
        values = ID["v0"] + self.below(task.values, index, VALUE, max(task.counts))
        order = self.drawn(index, PLACE, task.length)
        text = np.full((len(index), task.length), ID["."], dtype=np.int64)
        labels = np.full(text.shape, UNSCORED, dtype=np.int64)
        for b, N in enumerate(counts.tolist()):
            text[b, np.sort(order[b, : task.length - N].argsort()[:N])] = values[b, :N]
            text[b, -N:], labels[b, -N:] = ID["k0"], values[b, :N]
        live = torch.ones(text.shape, dtype=torch.bool)
        return Documents(
            torch.from_numpy(text), live, live.clone(), (task.length,), torch.from_numpy(index),
            tuple(f"copying-{self.part}-{i:06d}" for i in rows), epoch, step,
            facts=torch.from_numpy(counts), labels=torch.from_numpy(labels),
        )  # fmt: skip
