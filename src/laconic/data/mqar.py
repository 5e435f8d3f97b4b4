"""Multi-query associative recall (arXiv:2312.04927): pairs of key and value, then each key once more, for its value.

A document is its pairs one after another, then its queries in any order at drawn places; what is between is silence.
A value stands behind its query and is predicted there, and nothing else is scored. Made by arithmetic when asked for.
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
from laconic.data.settings import Part
from laconic.data.task_settings import Pairs
from laconic.data.tokens import Tokenizer, built

MOST = 256  # keys and values there are words for; a task may use fewer
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
WORDS = [*SPECIAL.values(), ".", *(f"k{i}" for i in range(MOST)), *(f"v{i}" for i in range(MOST))]
ID = {word: i for i, word in enumerate(WORDS)}
COUNT, KEY, VALUE, PLACE, TURN = range(5)  # what is drawn
Ints = NDArray[np.int64]


def mqar_tokenizer() -> Tokenizer:
    """516 words: keys k0…, values v0…, a dot for silence, and the special ones; words are parted by spaces."""
    inner = tokenizers.Tokenizer(models.WordLevel(ID, unk_token="<unk>"))  # pyright: ignore[reportCallIssue]
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(SPECIAL.values()))
    return built(inner, SPECIAL)


class Mqar:
    """The first `count` documents of a part (contract.Source), all of them one segment of T tokens."""

    def __init__(self, seed: int, task: Pairs, part: Part = "train", count: int | None = None) -> None:
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
        return self.task.length

    def __len__(self) -> int:
        return self.rows

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Documents:
        """The documents of some places."""
        task, index = self.task, np.asarray(rows, dtype=np.int64)
        counts = np.asarray(task.pairs)[(self.drawn(index, COUNT, 1) * len(task.pairs)).astype(np.int64)[:, 0]]
        most = max(task.pairs)
        keys = ID["k0"] + self.drawn(index, KEY, task.keys).argsort(1)[:, :most]
        values = ID["v0"] + (self.drawn(index, VALUE, most) * task.values).astype(np.int64)
        turns = self.drawn(index, TURN, most)
        text = np.full((len(index), task.length), ID["."], dtype=np.int64)
        scored = np.zeros(text.shape, dtype=bool)
        for b, N in enumerate(counts.tolist()):
            text[b, 0 : 2 * N : 2], text[b, 1 : 2 * N : 2] = keys[b, :N], values[b, :N]
            places = self.drawn(index[b : b + 1], PLACE, task.length // 2 - N)[0].argsort()[:N]
            at, turn = 2 * N + 2 * places, turns[b, :N].argsort()
            text[b, at], text[b, at + 1] = keys[b, turn], values[b, turn]
            scored[b, at + 1] = True
        return Documents(
            torch.from_numpy(text), torch.ones(text.shape, dtype=torch.bool), torch.from_numpy(scored),
            (task.length,), torch.from_numpy(index), tuple(f"mqar-{self.part}-{i:06d}" for i in rows), epoch, step,
            facts=torch.from_numpy(counts),
        )  # fmt: skip

    def drawn(self, index: Ints, what: int, count: int) -> NDArray[np.float64]:
        """So many draws in [0, 1) for each document, [n, count]."""
        return uniform(self.seed, what, index[:, None], np.arange(count))
