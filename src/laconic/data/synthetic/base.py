"""What sets that are made when asked for share: the rows of a part, draws that are each row's own, a tokenizer."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from laconic.config.data import SplitName
from laconic.data.tokenizer import Tokenizer, wrap_backend
from laconic.rng import uniform
from laconic.storage.strict_json import to_canonical_json

SPECIAL_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
IntArray = NDArray[np.int64]


class SyntheticConfig(Protocol):
    """The settings of a task: how many rows each part has, beside what the rows are a function of."""

    @property
    def train_rows(self) -> int: ...
    @property
    def valid_rows(self) -> int: ...
    @property
    def test_rows(self) -> int: ...
    def model_dump(self) -> Mapping[str, Any]: ...


SyntheticConfigT = TypeVar("SyntheticConfigT", bound=SyntheticConfig)


def build_word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Of those words, which are parted by spaces; the special ones are among them."""
    inner = tokenizers.Tokenizer(  # pyright: ignore[reportCallIssue]
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(SPECIAL_TOKENS.values()))
    return wrap_backend(inner, SPECIAL_TOKENS)


class SyntheticDataset(Generic[SyntheticConfigT]):
    """The first `count` rows of a part; each is a function of its place, and parts are drawn apart."""

    vocabulary: ClassVar[Sequence[str]]

    def __init__(
        self, seed: int, config: SyntheticConfigT, part: SplitName = "train", max_rows: int | None = None
    ) -> None:
        self.config, self.part = config, part
        self.seed = 3 * seed + get_args(SplitName).index(part)
        rows = {"train": config.train_rows, "valid": config.valid_rows, "test": config.test_rows}[part]
        self.num_rows = min(max_rows or rows, rows)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the rows are a function of."""
        said = {"task": self.config.model_dump(), "seed": self.seed, "words": self.vocabulary}
        return hashlib.sha256(to_canonical_json(said).encode()).hexdigest()

    def __len__(self) -> int:
        return self.num_rows

    def uniform(self, index: IntArray, purpose: int, count: int) -> NDArray[np.float64]:
        """So many draws in [0, 1) for each row, [n, count]; `what` keeps those for one thing from another's."""
        return uniform(self.seed, purpose, index[:, None], np.arange(count))

    def randint(self, n: int, index: IntArray, purpose: int, count: int) -> IntArray:
        """The same as whole numbers below n."""
        return (self.uniform(index, purpose, count) * n).astype(np.int64)
