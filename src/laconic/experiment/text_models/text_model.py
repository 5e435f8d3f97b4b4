"""What the models of `laconic.load` share: names and numbers of texts, the ids that end one, and descriptions."""

import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder

Prompt = TypeVar("Prompt")


def name_texts(texts: Iterable[str] | str, names: Sequence[str] | str) -> list[tuple[str, str]]:
    """Return pairs of name and text, for a single text one pair; unnamed texts are numbered."""
    texts = list_texts("texts", texts)
    names = [names] if isinstance(names, str) else [*names] or [f"text {i}" for i in range(1, len(texts) + 1)]
    if not texts:
        raise UsageError("texts: give at least one text")
    if len(names) != len(texts):
        raise UsageError(f"names: {len(names)} for {len(texts)} texts; give one per text, or none")
    return list(zip(names, texts, strict=True))


def list_texts(name: str, texts: Iterable[str] | str) -> list[str]:
    """Return texts, which a generator may yield, as a list; a single text is one. Raise `UsageError` for others."""
    is_single = isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable)
    values = [texts] if is_single else list(texts)
    check_texts(name, values)
    return cast(list[str], values)


def check_texts(name: str, texts: Sequence[object]) -> None:
    """Raise `UsageError` if one of several texts is something else, such as bytes or a chat message."""
    other = next((type(text) for text in texts if not isinstance(text, str)), None)
    if other is not None:
        hint = "; laconic.ChatSession replies to chat messages" if issubclass(other, Mapping) else ""
        raise UsageError(f"{name}: give text (str), not {other.__name__}{hint}")


def check_memory_type(memory: object, expected: type) -> None:
    """Raise `UsageError` for a memory of another kind than a model reads."""
    if not isinstance(memory, expected):
        raise UsageError(
            f"memory: this model reads a {expected.__name__} or its file, not {type(memory).__name__}; pass one"
        )


def check_is_one_text(num_texts: int) -> None:
    """Raise `UsageError` for the memory of several texts as the beginning of one conversation."""
    if num_texts != 1:
        raise UsageError(f"memory: {num_texts} texts; a conversation takes a memory of one text")


def find_eos_ids(config: DecoderConfig) -> tuple[int, ...]:
    """Return the ids that end a text, without those beyond the vocabulary, which some published configurations have."""
    return tuple(token for token in config.eos_token_ids if token < config.vocab_size)


def find_stop_token_ids(tokenizer: Tokenizer, config: DecoderConfig, *, is_reply: bool = False) -> tuple[int, ...]:
    """Return the ids that end a text: the tokenizer's eos, or the configuration's list if it contains that.

    A reply of a chat ends at the ids of either: the tokenizer's eos may end a turn, the others a text.
    """
    eos = tokenizer.eos_token_id
    eos_token_ids = find_eos_ids(config)
    if eos is None or eos in eos_token_ids or eos >= config.vocab_size:
        return eos_token_ids
    return (*eos_token_ids, eos) if is_reply else (eos,)


def match_prompts(prompts: Sequence[Prompt], num_texts: int) -> list[Prompt]:
    """Return as many prompts as texts of a memory: one text serves all prompts, and one prompt all texts."""
    if len(prompts) != num_texts and 1 not in (len(prompts), num_texts):
        raise UsageError(f"{len(prompts)} prompts for a memory of {num_texts} texts; give one prompt, or one per text")
    return list(prompts) * (num_texts if len(prompts) == 1 else 1)


def describe_decoder(decoder: Decoder) -> str:
    config = decoder.config
    return f"{Path(decoder.name_or_path).name}, {config.num_hidden_layers} layers, width {config.hidden_size}"


def current_time() -> str:
    """Return the time in ISO format, or the time that SOURCE_DATE_EPOCH gives."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    time = datetime.datetime.now(datetime.UTC)
    time = datetime.datetime.fromtimestamp(int(epoch), datetime.UTC) if epoch.isdecimal() else time
    return time.isoformat(timespec="seconds")
