"""Shared by the synthetic document tasks: rows that are a function of seed and index, and their tokenizer."""

from collections.abc import Sequence
from typing import Any, ClassVar, get_args

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from laconic.batches import DocumentBatch
from laconic.config.data import SplitName
from laconic.data.tokenizer import Tokenizer, wrap_backend
from laconic.rng import uniform
from laconic.storage.manifest import hash_json

SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class SyntheticDataset:
    """The first `max_rows` rows of a split, each a function of its index; splits have different random numbers."""

    vocabulary: ClassVar[Sequence[str]]
    config: Any

    def __init__(self, seed: int, config: Any, part: SplitName = "train", max_rows: int | None = None) -> None:
        self.config, self.part = config, part
        self.seed = 3 * seed + get_args(SplitName).index(part)
        rows = {"train": config.train_rows, "valid": config.valid_rows, "test": config.test_rows}[part]
        self.num_rows = min(max_rows or rows, rows)

    @classmethod
    def build_tokenizer(cls) -> Tokenizer:
        """Build the tokenizer of the vocabulary: words separated by spaces, special tokens among them."""
        backend = tokenizers.Tokenizer(  # pyright: ignore[reportCallIssue]
            models.WordLevel({word: i for i, word in enumerate(cls.vocabulary)}, unk_token="<unk>")
        )
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(list(SPECIAL_TOKENS.values()))
        return wrap_backend(backend, SPECIAL_TOKENS)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the rows."""
        source = {"task": self.config.model_dump(), "seed": self.seed, "words": self.vocabulary}
        return hash_json(source)

    @property
    def max_length(self) -> int:
        return self.config.row_tokens

    def __len__(self) -> int:
        return self.num_rows

    def build_batch(
        self, name: str, input_ids: IntArray, loss_mask: NDArray[np.bool_], index: IntArray, epoch: int, step: int
    ) -> DocumentBatch:
        """Return documents of one segment and equal length, whose ids begin with the name of the task."""
        return DocumentBatch(
            input_ids=torch.from_numpy(input_ids),
            attention_mask=torch.ones(input_ids.shape, dtype=torch.bool),
            loss_mask=torch.from_numpy(loss_mask),
            segment_ends=(input_ids.shape[1],),
            row_index=torch.from_numpy(index),
            document_ids=tuple(f"{name}-{self.part}-{i:06d}" for i in index.tolist()),
            epoch=epoch,
            step=step,
        )

    def uniform(self, index: IntArray, purpose: int, count: int) -> NDArray[np.float64]:
        """Return random numbers in [0, 1), [n, count]; different purposes give independent numbers."""
        return uniform(self.seed, purpose, index[:, None], np.arange(count))

    def randint(self, n: int, index: IntArray, purpose: int, count: int) -> IntArray:
        """Return random integers below n, [rows, count]."""
        return (self.uniform(index, purpose, count) * n).astype(np.int64)

    def choose(self, options: Sequence[int], index: IntArray, purpose: int) -> IntArray:
        return np.asarray(options)[self.randint(len(options), index, purpose, 1)[:, 0]]
