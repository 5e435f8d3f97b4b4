"""The recall task: a document is facts among fillers, then queries; a fact pairs a key with a value.

Length and number of scored tokens are the same however many facts there are, so that what is at stake is shared by
fewer or more of them: Q log(values) nats in all. Made by arithmetic when asked for, each document from its place.
"""

import hashlib
from collections.abc import Sequence
from typing import get_args

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from laconic.core.contract import Documents
from laconic.core.keyed import uniform
from laconic.core.strict import canonical
from laconic.data.settings import Part, Recall
from laconic.data.tokens import Tokenizer, built

KEYS, VALUES, FILLERS = (16, 16, 8)  # words there are for; a task may use fewer
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
WORDS = [
    *SPECIAL.values(),
    *(f"x{i}" for i in range(FILLERS)),
    *(f"k{i}" for i in range(KEYS)),
    *(f"v{i}" for i in range(VALUES)),
    *(f"k{i}v{j}" for i in range(KEYS) for j in range(VALUES)),
]
ID = {word: i for i, word in enumerate(WORDS)}
COUNT, ORDER, VALUE, PLACE, FILLER, QUERY = range(6)  # what is drawn
Ints = NDArray[np.int64]


def recall_tokenizer() -> Tokenizer:
    """299 words: fillers x0…, keys k0…, values v0…, facts k0v0…, and the special ones; words are parted by spaces."""
    inner = tokenizers.Tokenizer(models.WordLevel(ID, unk_token="<unk>"))  # pyright: ignore[reportCallIssue]
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(SPECIAL.values()))
    return built(inner, SPECIAL)


class Recalls:
    """The first `count` documents of a part (contract.Source): segments of facts, and one of Q times key and value."""

    def __init__(self, seed: int, task: Recall, part: Part = "train", count: int | None = None) -> None:
        self.task, self.part = task, part
        self.seed = 3 * seed + get_args(Part).index(part)
        rows = {"train": task.rows, "valid": task.valid_rows, "test": task.test_rows}[part]
        self.rows = min(count or rows, rows)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the documents are a function of."""
        said = {"task": self.task.model_dump(), "seed": self.seed, "words": WORDS}
        return hashlib.sha256(canonical(said).encode()).hexdigest()

    @property
    def longest(self) -> int:
        """Tokens of a document."""
        return self.task.length * self.task.segments + 2 * self.task.queries

    def __len__(self) -> int:
        return self.rows

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

    def drawn(self, index: Ints, what: int, count: int) -> NDArray[np.float64]:
        """So many draws in [0, 1) for each document, [n, count]."""
        return uniform(self.seed, what, index[:, None], np.arange(count))

    def below(self, n: int, index: Ints, what: int, count: int) -> Ints:
        """The same as whole numbers below n."""
        return (self.drawn(index, what, count) * n).astype(np.int64)
