"""Prompts that a loaded model has encoded, with what precedes them, and the texts that it generates after them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

from laconic.batches import PassCounts, StopReason
from laconic.console import escape_controls
from laconic.data.messages import Message, add_system_message
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.text_models.text_model import match_prompts
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import Generation
from laconic.models.decoder import Decoder


@dataclass(frozen=True)
class PromptRow:
    """A prompt: a text to continue, or chat messages to reply to.

    The name is for error messages. A text may be echoed before its continuation. `source` is the object of the JSONL
    row that it came from, `tools` are its JSON schemas for the chat template. `title` names the text of a memory that
    it follows, if there are several.
    """

    name: str
    text: str | None
    messages: Sequence[Message] = ()
    should_echo: bool = False
    source: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] = ()
    title: str = ""

    def encode(self, tokenizer: Tokenizer, is_continuation: bool = False) -> list[int]:
        """Return the ids of the text, or of the messages in the chat template; a continuation gets no BOS."""
        if self.text is None:
            text = tokenizer.apply_chat_template(self.messages, tools=self.tools)
            return tokenizer.encode(text, add_special_tokens=False)
        ids = tokenizer.encode(self.text, add_special_tokens=not is_continuation)
        if not ids:
            raise UsageError(f"{self.name} is empty; give text")
        return ids

    def to_chat(self, system: str | None = None) -> Self:
        """Return the messages, after a system message; a text is a user message, which is not echoed."""
        messages = self.messages if self.text is None else [{"role": "user", "content": self.text}]
        return replace(self, text=None, messages=add_system_message(messages, system), should_echo=False)

    def to_json(self) -> dict[str, Any]:
        prompt = {"messages": list(self.messages)} if self.text is None else {"prompt": self.text}
        return prompt | ({"title": self.title.strip()} if self.title else {})


def pair_with_texts(
    prompts: Sequence[PromptRow], num_texts: int, documents: Sequence[Sequence[Any]]
) -> list[PromptRow]:
    """Return as many prompts as texts of a memory, as `match_prompts` does.

    A single prompt after several texts has the names of each one's documents as title.
    """
    if len(prompts) != 1 or num_texts == 1:
        return match_prompts(prompts, num_texts)
    names = [f"row {number}" for number in range(1, num_texts + 1)]
    if len(documents) == num_texts:
        names = [", ".join(document.name for document in row) for row in documents]
    return [replace(prompts[0], title=f"[{escape_controls(name)}] ") for name in names]


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        text: The answer, without the end-of-sequence id or stop string that ended it.
        token_ids: Its ids.
        passes: The decoder calls that it took.
        logprobs: Log probability of each id in nats; None if the method does not return them.
        stop_reason: As in `laconic.Generation`.
        num_prompt_tokens: Tokens of the question.
    """

    text: str
    token_ids: tuple[int, ...]
    passes: PassCounts
    logprobs: tuple[float, ...] | None = None
    stop_reason: StopReason = "eos"
    num_prompt_tokens: int = 0


GeneratedText = Generation | Answer


class TextModel(Protocol):
    """What `laconic.load` returns: text in, text out."""

    @property
    def decoder(self) -> Decoder: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    def prepare(self, prompts: Sequence[PromptRow], memory: Any = None) -> "PreparedPrompts":
        """Encode prompts that follow a memory of the kind that the model reads, or its file."""
        ...


@dataclass(frozen=True)
class PreparedPrompts(ABC):
    """Prompts that a model has encoded and checked before it generates a text after each of them.

    `ids` are those of the prompts, without what precedes them.
    """

    prompts: Sequence[PromptRow]
    ids: Sequence[Sequence[int]]
    model: TextModel
    counts_passes: ClassVar[bool] = False  # whether the work is more than reading prompts and writing texts

    @property
    def fingerprint(self) -> str:
        """Hash of all weights that decide what is generated."""
        return self.model.decoder.fingerprint

    @abstractmethod
    def generate(self, rows: range, config: GenerationConfig) -> Sequence[GeneratedText]:
        """Generate after some of the prompts as one batch."""

    def describe_model(self) -> dict[str, Any]:
        """Return what JSON output says of the model."""
        return {"weights": self.fingerprint}

    def seed_rows(self, rows: range, config: GenerationConfig) -> GenerationConfig:
        """Return options with which the samples of a row depend on the seed and on its number alone."""
        assert isinstance(config.seed, int)
        return replace(config, seed=[config.seed + i for i in rows])

    def can_share_batch(self, row: int, other: int) -> bool:
        """Return whether the options of one prompt are also those of another."""
        return True

    def generate_in_batches(
        self, config: GenerationConfig, batch_size: int, start: int = 0
    ) -> Iterator[Sequence[GeneratedText]]:
        """Yield what follows the prompts from `start` on, one batch after the other."""
        stop = start
        while stop < len(self.prompts):
            start = stop
            while stop < min(start + batch_size, len(self.prompts)) and self.can_share_batch(start, stop):
                stop += 1
            rows = range(start, stop)
            yield self.generate(rows, self.seed_rows(rows, config))
