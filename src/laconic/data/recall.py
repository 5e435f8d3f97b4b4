"""The recall task: a document is facts among fillers, then queries; a fact pairs a key with a value.

Length and number of scored tokens are the same however many facts there are, so that what is at stake is shared by
fewer or more of them: Q log(values) nats in all. Made by arithmetic when asked for, each document from its place.
"""

from collections.abc import Sequence

import numpy as np
import torch

from laconic.core.contract import Documents
from laconic.data.drawn import SPECIAL, Drawn, Ints, word_tokenizer
from laconic.data.settings import Recall
from laconic.data.tokens import Tokenizer

KEYS, VALUES, FILLERS = (16, 16, 8)  # words there are for; a task may use fewer
WORDS = [
    *SPECIAL.values(),
    *(f"x{i}" for i in range(FILLERS)),
    *(f"k{i}" for i in range(KEYS)),
    *(f"v{i}" for i in range(VALUES)),
    *(f"k{i}v{j}" for i in range(KEYS) for j in range(VALUES)),
]
ID = {word: i for i, word in enumerate(WORDS)}
COUNT, ORDER, VALUE, PLACE, FILLER, QUERY = range(6)  # what is drawn


def recall_tokenizer() -> Tokenizer:
    """299 words: fillers x0…, keys k0…, values v0…, facts k0v0…, and the special ones; words are parted by spaces."""
    return word_tokenizer(WORDS)


class Recalls(Drawn[Recall]):
    """The first `count` documents of a part (contract.Source): segments of facts, and one of Q times key and value."""

    words = WORDS

    @property
    def longest(self) -> int:
        """Tokens of a document."""
        return self.task.length * self.task.segments + 2 * self.task.queries

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Documents:
        """The documents of some places."""
        task, index = self.task, np.asarray(rows, dtype=np.int64)
        counts = np.asarray(task.facts)[self.below(len(task.facts), index, COUNT, 1)[:, 0]]
        keys = self.drawn(index, ORDER, task.keys).argsort(1)[:, : max(task.facts)]
        values = self.below(task.values, index, VALUE, keys.shape[1])
        ask = (self.drawn(index, QUERY, task.queries) * counts[:, None]).astype(np.int64)
        asked = np.stack([np.take_along_axis(part, ask, 1) for part in (ID["k0"] + keys, ID["v0"] + values)], 2)
        text = np.concatenate([self.facts(index, counts, keys, values), asked.reshape(len(index), -1)], 1)
        scored = np.zeros(text.shape, dtype=bool)
        scored[:, -2 * task.queries + 1 :: 2] = True
        cuts = tuple(task.length * (i + 1) for i in range(task.segments))
        return Documents(
            torch.from_numpy(text), torch.ones(text.shape, dtype=torch.bool), torch.from_numpy(scored),
            (*cuts, text.shape[1]), torch.from_numpy(index), tuple(f"recall-{self.part}-{i:06d}" for i in rows),
            epoch, step, windows=task.windows, facts=torch.from_numpy(counts),
        )  # fmt: skip

    def facts(self, index: Ints, counts: Ints, keys: Ints, values: Ints) -> Ints:
        """Fillers with facts at random places, [n, segments * length]; a fact of two tokens stays in its segment."""
        task, width = self.task, 2 if self.task.two_tokens else 1
        text = ID["x0"] + self.below(task.fillers, index, FILLER, task.segments * task.length)
        places = self.drawn(index, PLACE, text.shape[1] // width).argsort(1)[:, : keys.shape[1]] * width
        row, column = np.nonzero(np.arange(keys.shape[1]) < counts[:, None])
        at, key, value = places[row, column], keys[row, column], values[row, column]
        if task.two_tokens:
            text[row, at], text[row, at + 1] = ID["k0"] + key, ID["v0"] + value
        else:
            text[row, at] = ID["k0v0"] + key * VALUES + value
        return text
