"""A conversation with a model: the messages, and the KV cache of all that the model has read of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

import torch

from laconic.compression.kv.memory import KVMemory
from laconic.data.messages import Message, add_system_message, check_messages
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.text_models.kv_compressor import get_opening, render_after_opening
from laconic.experiment.text_models.text_model import check_texts, find_stop_token_ids
from laconic.generation.config import GREEDY, GenerationConfig, check_config, check_type
from laconic.generation.generate import Generation, generate
from laconic.generation.prompt import check_is_decoder
from laconic.generation.state import DecodeState
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder


class ContextFullError(UsageError):
    """The conversation has no room for a reply in the model's context."""


@dataclass(frozen=True)
class ChatPrefix:
    """What the model has before the conversation, such as a memory of documents.

    Attributes:
        first_position: Position of the conversation's first token; None: the one after the last cached position.
        opening: For a memory whose text is the beginning of the first user message: the chat template up to there.
        reading_mode: Returns a context in which the model reads, for models with adapters that only write memories.
    """

    cache: KVCache
    first_position: int | None = None
    opening: str = ""
    reading_mode: Callable[[], AbstractContextManager[object]] = nullcontext

    @classmethod
    def from_kv_memory(cls, memory: KVMemory, tokenizer: Tokenizer) -> "ChatPrefix":
        """Return the cache of a KV memory of one text; the errors are those of `get_opening`."""
        return cls(memory.to_cache(), int(memory.num_tokens[0]), get_opening(tokenizer, memory))


class ChatSession:
    """A conversation. Each reply reads only the tokens that the model has not read yet.

    Every turn renders all messages with the chat template, as transformers does, and compares the tokens with those in
    the cache: what is equal from the beginning on is not read again. A template may rewrite earlier turns (some remove
    the thoughts of old replies); then everything from the first difference on is read again.

    Args:
        decoder: The model.
        tokenizer: Its tokenizer, with a chat template.
        system: System message.
        prefix: A KV cache that precedes the conversation, such as that of a memory; see `ChatPrefix`.

    Attributes:
        messages: The conversation; assign a list to replace it.
        num_reused: Tokens of the last prompt that were already in the cache.

    Examples:
        >>> import laconic
        >>> model = laconic.load("smollm2")  # doctest: +SKIP
        >>> session = laconic.ChatSession(model.decoder, model.tokenizer, system="Be brief.")  # doctest: +SKIP
        >>> session.reply("What is the capital of France?").text  # doctest: +SKIP
        'The capital of France is Paris.'
        >>> session.reply("And of Italy?").num_prompt_tokens  # the new question alone  # doctest: +SKIP
        15
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, *, system: str | None = None, prefix: ChatPrefix | None = None
    ) -> None:
        check_is_decoder(decoder)
        check_type("tokenizer", tokenizer, Tokenizer, "laconic.load_tokenizer(…), such as model.tokenizer")
        self.decoder, self.tokenizer, self.prefix = decoder, tokenizer, prefix
        self.messages: list[Message] = []
        self.set_system(system)
        self.cache = None if prefix is None else prefix.cache
        self.cached_ids: list[int] = []
        self.num_reused = 0
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])  # fails now if there is no template

    def __repr__(self) -> str:
        used = f"{len(self.cached_ids):,} of {self.context_size:,} tokens"
        return f"ChatSession({len(self.messages)} messages, {used})"

    @property
    def context_size(self) -> int:
        """Number of tokens that the model reads at most, without the slots of the prefix."""
        return self.decoder.config.max_position_embeddings - self.first_position

    @property
    def first_position(self) -> int:
        """Position of the conversation's first token."""
        if self.prefix is None:
            return 0
        if self.prefix.first_position is not None:
            return self.prefix.first_position
        return int(self.prefix.cache.next_position.amax())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply: the model's and the tokenizer's."""
        return find_stop_token_ids(self.tokenizer, self.decoder.config, is_reply=True)

    @property
    def system(self) -> str | None:
        """The system message."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    def set_system(self, system: str | None) -> None:
        """Replace the system message, or remove it for None; the conversation stays."""
        check_texts("system", [] if system is None else [system])
        turns = self.messages[1:] if self.system is not None else self.messages
        self.messages = add_system_message(turns, system)

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self.messages = add_system_message([], self.system)

    def load_messages(self, messages: Sequence[Message]) -> None:
        """Replace the conversation by messages as in the OpenAI API. Raises InputError for invalid messages."""
        self.messages = check_messages(list(messages) if isinstance(messages, tuple) else messages, "messages")

    def encode(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> list[int]:
        """Return the ids of `messages` in the chat template up to the reply; after an opening, without `variables`."""
        if self.prefix is None or not self.prefix.opening:
            text = self.tokenizer.apply_chat_template(messages, variables=variables)
        else:
            text = render_after_opening(self.tokenizer, messages, self.prefix.opening)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def reply(self, text: str, config: GenerationConfig = GREEDY) -> Generation:
        """Add `text` as a user message, generate the reply and add it.

        An error or interruption leaves the conversation as it was. A reply that `config.on_token` cancels is added as
        far as it goes.

        `max_tokens` of the `config` is lowered to what fits the context.

        Returns:
            The reply; its `num_prompt_tokens` are the tokens that were read for it.

        Raises:
            ContextFullError: The messages leave no room for a reply.
            InputError: The chat template rejects the messages.
        """
        check_texts("reply", [text])
        check_config(config)
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.encode(messages)
        room = self.context_size - len(ids)
        if room < 1:
            raise ContextFullError(
                f"the conversation has {len(ids):,} tokens, the context {self.context_size:,}; begin a new one"
            )
        config = replace(
            config,
            max_tokens=min(config.max_tokens, room),
            min_tokens=min(config.min_tokens, room),
            eos_token_ids=self.eos_token_ids if config.eos_token_ids is None else config.eos_token_ids,
            return_state=True,
        )
        generation = self.generate(ids, config)
        self.messages = [*messages, {"role": "assistant", "content": generation.text}]
        return generation

    def generate(self, ids: list[int], config: GenerationConfig) -> Generation:
        """Generate, as `config` says, from the `ids` of the whole conversation, reading those that are not cached."""
        pairs = zip(self.cached_ids, ids[:-1], strict=False)  # the last id is read again, for its logits
        num_reused = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        num_prefix_slots = 0 if self.prefix is None else self.prefix.cache.S
        state = None if self.cache is None else self.cache.crop(num_prefix_slots + num_reused)
        first_positions = None if self.prefix is None else torch.tensor([self.first_position + num_reused])
        with nullcontext() if self.prefix is None else self.prefix.reading_mode():
            generation = generate(
                self.decoder,
                self.tokenizer,
                input_ids=[ids[num_reused:]],
                state=state,
                first_positions=first_positions,
                config=config,
            )[0]
        self.cache = cast(DecodeState, generation.state).cache
        self.cached_ids = ids + generation.token_ids[:-1]
        self.num_reused = num_reused
        return generation
