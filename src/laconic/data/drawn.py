"""What sets that are made when asked for share: the rows of a part, draws that are each row's own, a tokenizer."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from laconic.core.keyed import uniform
from laconic.core.strict import canonical
from laconic.data.settings import Part
from laconic.data.tokens import Tokenizer, built

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
Ints = NDArray[np.int64]


class Rows(Protocol):
    """The settings of a task: how many rows each part has, beside what the rows are a function of."""

    @property
    def rows(self) -> int: ...
    @property
    def valid_rows(self) -> int: ...
    @property
    def test_rows(self) -> int: ...
    def model_dump(self) -> Mapping[str, Any]: ...


Task = TypeVar("Task", bound=Rows)


def word_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Of those words, which are parted by spaces; the special ones are among them."""
    inner = tokenizers.Tokenizer(  # pyright: ignore[reportCallIssue]
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(SPECIAL.values()))
    return built(inner, SPECIAL)


class Drawn(Generic[Task]):
    """The first `count` rows of a part; each is a function of its place, and parts are drawn apart."""

    words: ClassVar[Sequence[str]]

    def __init__(self, seed: int, task: Task, part: Part = "train", count: int | None = None) -> None:
        self.task, self.part = task, part
        self.seed = 3 * seed + get_args(Part).index(part)
        rows = {"train": task.rows, "valid": task.valid_rows, "test": task.test_rows}[part]
        self.rows = min(count or rows, rows)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the rows are a function of."""
        said = {"task": self.task.model_dump(), "seed": self.seed, "words": self.words}
        return hashlib.sha256(canonical(said).encode()).hexdigest()

    def __len__(self) -> int:
        return self.rows

    def drawn(self, index: Ints, what: int, count: int) -> NDArray[np.float64]:
        """So many draws in [0, 1) for each row, [n, count]; `what` keeps those for one thing from another's."""
        return uniform(self.seed, what, index[:, None], np.arange(count))

    def below(self, n: int, index: Ints, what: int, count: int) -> Ints:
        """The same as whole numbers below n."""
        return (self.drawn(index, what, count) * n).astype(np.int64)
