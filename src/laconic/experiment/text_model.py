"""What the models that compress texts share: names of texts, and the ids that end one."""

from collections.abc import Sequence

from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError


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
