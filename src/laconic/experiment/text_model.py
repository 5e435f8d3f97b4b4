"""The interface of models that compress texts, into summary vectors or fast weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.generation.config import GREEDY, GenerationConfig
from laconic.generation.generate import Generation

CompressedT = TypeVar("CompressedT")  # SummaryMemory or FastWeightState, one row per text


class TextModel(Protocol[CompressedT]):
    """A model with its tokenizer that turns texts into a compressed value and generates text on it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        ...

    def compress(self, texts: Sequence[str], *, names: Sequence[str] = ()) -> CompressedT:
        """Compress texts, one row for each."""
        ...

    def generate(
        self, prompts: Sequence[str], compressed: CompressedT | None = None, /, *, config: GenerationConfig = GREEDY
    ) -> list[Generation]:
        """Continue prompts on a compressed value, or without one."""
        ...

    def save(self, compressed: CompressedT, path: str | Path, /) -> None:
        """Write a compressed value to a file."""
        ...

    def load(self, path: str | Path, /) -> CompressedT:
        """Read a file that `save` wrote."""
        ...


def name_texts(texts: Sequence[str], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of name and text; unnamed texts are numbered.

    Raises:
        UsageError: If there is no text, or another number of names.
    """
    names = [*names] or [f"text {i}" for i in range(1, len(texts) + 1)]
    if isinstance(texts, str) or not texts or len(names) != len(texts):
        raise UsageError("texts: give a list of at least one text, and one name per text or none")
    return list(zip(names, texts, strict=True))


def find_stop_token_ids(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids that end a text: the tokenizer's eos, or the configuration's list if it contains that."""
    eos = tokenizer.eos_token_id
    return eos_token_ids if eos is None or eos in eos_token_ids else (eos,)
