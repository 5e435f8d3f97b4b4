"""A plain language model: continue texts with a checkpoint, or with the decoder that a run trained."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from laconic.compression.kv.config import DEFAULT_CONFIG, KVCompressionConfig
from laconic.compression.kv.memory import KVMemory
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.export import export_model
from laconic.experiment.text_models.chat_session import ChatPrefix
from laconic.experiment.text_models.kv_compressor import (
    MemorySource,
    build_row_caches,
    compress_text,
    encode_messages,
    is_chat_memory,
    load_kv_memories,
)
from laconic.experiment.text_models.prompts import PreparedPrompts, PromptRow, pair_with_texts
from laconic.experiment.text_models.text_model import (
    check_is_one_text,
    describe_decoder,
    find_eos_ids,
    find_stop_token_ids,
    list_texts,
    name_texts,
)
from laconic.generation.config import GREEDY, GenerationConfig, check_config
from laconic.generation.generate import Generation, generate
from laconic.models.config import DecoderConfig
from laconic.models.decoder import Decoder


@dataclass(frozen=True)
class LanguageModel:
    """A decoder with its tokenizer, as `laconic.load` returns it for a checkpoint.

    Attributes:
        decoder: The decoder.
        tokenizer: Its tokenizer.
        recipe: Recipe of the run that trained it; None for a checkpoint.

    Examples:
        >>> import laconic
        >>> from laconic.data.tokenizer import build_byte_tokenizer
        >>> tokenizer = build_byte_tokenizer()
        >>> decoder = laconic.Decoder(laconic.DecoderConfig.tiny("llama", vocab_size=tokenizer.vocab_size))
        >>> model = laconic.LanguageModel(decoder, tokenizer)
        >>> len(model.generate(["Once", "The end"], laconic.GenerationConfig(max_tokens=4)))
        2
        >>> model
        LanguageModel(llama, 2 layers, width 48)
    """

    decoder: Decoder
    tokenizer: Tokenizer
    recipe: Recipe | None = None

    def generate(
        self,
        prompts: Iterable[str] | str,
        config: GenerationConfig = GREEDY,
        *,
        memory: MemorySource | Sequence[MemorySource] | None = None,
    ) -> list[Generation]:
        """Continue prompts, or texts that a memory holds, as `laconic generate --memory` does.

        Args:
            prompts: Texts; a single text is one prompt. After a memory of a chat they are user messages to reply to.
            config: Length, sampling, stop conditions and streaming, as in `laconic.generate`.
            memory: Memory that the prompts follow, a file of `laconic compress`, or the folder of a peft cartridge.
                One text serves all prompts, and one prompt all texts. A list is joined in order, as several `--memory`
                are.

        Returns:
            One `laconic.Generation` per prompt, or per text of the memory.

        Raises:
            UsageError: If a prompt is empty, the numbers of prompts and texts do not fit, or the options do not fit the
                model.
            CorruptArtifactError: If a file is damaged, or the memory was written by another model.
            InputError: If there is no such file.

        Examples:
            >>> import laconic
            >>> model = laconic.load("stories260k")
            >>> ids = model.tokenizer.encode("Lily had a red ball. One day")
            >>> memory = laconic.compress_kv(model.decoder, ids, laconic.KVCompressionConfig("kvzip", keep=0.5))
            >>> config = laconic.GenerationConfig(max_tokens=8)
            >>> [len(result.token_ids) for result in model.generate([", she", ", her cat"], config, memory=memory)]
            [8, 8]
        """
        check_config(config)
        if memory is None:
            return generate(self.decoder, self.tokenizer, list_texts("prompts", prompts), config=config)
        rows = [PromptRow("the prompt", text) for text in list_texts("prompts", prompts)]
        prepared = self.prepare(rows, memory)
        return prepared.generate(range(len(prepared.prompts)), config)

    def prepare(
        self, prompts: Sequence[PromptRow], memory: MemorySource | Sequence[MemorySource] | None = None
    ) -> "TextPrompts":
        """Encode `prompts` that follow a `memory`, as for `generate`; after a memory of a chat they are user messages.

        Raises:
            UsageError: If a prompt is empty or has tools after a memory, or numbers of prompts and texts do not fit.
        """
        if memory is None:
            return TextPrompts(prompts, [prompt.encode(self.tokenizer) for prompt in prompts], self)
        with_tools = next((prompt for prompt in prompts if prompt.tools), None)
        if with_tools is not None:
            raise UsageError(f"{with_tools.name}: tools cannot follow a memory, whose text is already in the prompt")
        memory = load_kv_memories(memory, self.decoder, self.tokenizer)
        prompts = [prompt.to_chat() for prompt in prompts] if is_chat_memory(memory) else prompts
        prompts = pair_with_texts(prompts, memory.B, memory.metadata.documents if memory.metadata else ())
        ids = [
            encode_messages(self.tokenizer, memory, prompt.messages)
            if prompt.text is None
            else prompt.encode(self.tokenizer, is_continuation=True)
            for prompt in prompts
        ]
        return TextPrompts(prompts, ids, self, memory)

    def compress(
        self,
        texts: Iterable[str] | str,
        config: KVCompressionConfig = DEFAULT_CONFIG,
        *,
        names: Sequence[str] = (),
        chat: bool = False,
    ) -> KVMemory:
        """Keep the most important keys and values of documents, as `laconic compress` does.

        Args:
            texts: The documents, or one; one row of the memory is written for each.
            config: Method and size.
            names: Names stored in the memory's metadata.
            chat: Read each document as the beginning of a user message, which prompts then continue.

        Returns:
            A memory for `generate`; `memory.save(path)` stores it for every other process and command.

        Raises:
            UsageError: If there is no text, or one does not fit the model.
            InputError: If a text is empty, or there is no chat template.

        Examples:
            >>> import laconic
            >>> model = laconic.load("stories260k")
            >>> memory = model.compress(["Lily had a red ball. " * 4], laconic.KVCompressionConfig("kvzip", keep=0.5))
            >>> memory.metadata.documents[0][0].name
            'text 1'
        """
        rows = [
            compress_text(self.decoder, self.tokenizer, text, config, name=name, chat=chat).memory
            for name, text in name_texts(texts, names)
        ]
        return rows[0] if len(rows) == 1 else KVMemory.concat_rows(*rows)

    def load_memory(self, path: str | Path) -> KVMemory:
        """Read a memory that this model may read, with the decoder's dtype and device.

        Args:
            path: File of `laconic compress` or `KVMemory.save`, or the folder of a peft cartridge.

        Raises:
            CorruptArtifactError: If the file is damaged or was written by another model.
            InputError: If there is no such file.
        """
        return load_kv_memories(path, self.decoder, self.tokenizer)

    def open_prefix(self, sources: Sequence[MemorySource]) -> ChatPrefix:
        """Return joined memories of one text as the beginning of a conversation."""
        memory = load_kv_memories(sources, self.decoder, self.tokenizer)
        check_is_one_text(memory.B)
        return ChatPrefix.from_kv_memory(memory, self.tokenizer)

    def save(self, folder: str | Path) -> None:
        """Write the model as a Hugging Face folder, new or empty, which transformers and `laconic.load` read.

        Raises:
            BusyError: If the folder is not empty.
            DiskError: If the disk is full.
        """
        export_model(self.decoder, folder, self.tokenizer)

    def __repr__(self) -> str:
        return f"LanguageModel({describe_decoder(self.decoder)})"


@dataclass(frozen=True)
class TextPrompts(PreparedPrompts):
    """Prompts of a `LanguageModel`, after the texts of a memory: one for all, or one for each.

    `rooms` are the numbers of tokens that fit into the context after each prompt; None does not end answers there.
    """

    model: LanguageModel
    memory: KVMemory | None = None
    rooms: Sequence[int] | None = None

    def end_in_context(self, name: str) -> Self:
        """Return prompts whose answers end where the context of the model, called `name`, is full.

        A memory takes the positions of the text that it replaces, or of its slots if the text was read in windows.
        Raises `UsageError` if a prompt leaves no room for an answer.
        """
        num_positions = self.model.decoder.config.max_position_embeddings
        before = [0] if self.memory is None else self.memory.num_tokens.tolist()
        before = before * len(self.ids) if len(before) == 1 else before
        rooms = [num_positions - n - len(ids) for ids, n in zip(self.ids, before, strict=True)]
        for prompt, ids, num_before, room in zip(self.prompts, self.ids, before, rooms, strict=True):
            if room < 1:
                after = f" after a memory of {num_before:,} positions" if num_before else ""
                raise UsageError(
                    f"{prompt.name} has {len(ids):,} tokens{after}, the context of {name} {num_positions:,}; "
                    f"shorten {'one of them' if after else 'it'} by {1 - room:,} tokens or more, "
                    "or go on with --allow-long-prompt"
                )
        return replace(self, rooms=rooms)

    def find_stop_ids(self, row: int) -> tuple[int, ...]:
        """Return the ids that end a row: the model's, and for chat messages the tokenizer's too, which ends a turn."""
        tokenizer, config = self.model.tokenizer, self.model.decoder.config
        is_reply = self.prompts[row].text is None
        return find_stop_token_ids(tokenizer, config, is_reply=True) if is_reply else find_eos_ids(config)

    def can_share_batch(self, row: int, other: int) -> bool:
        return self.find_stop_ids(row) == self.find_stop_ids(other)

    def generate(self, rows: range, config: GenerationConfig) -> list[Generation]:
        if not rows:
            return []
        decoder = self.model.decoder
        ids = self.ids[rows.start : rows.stop]
        state = None if self.memory is None else build_row_caches(self.memory, rows)
        if config.eos_token_ids is None:
            config = replace(config, eos_token_ids=self.find_stop_ids(rows.start))
        rooms = [config.max_tokens] * len(rows) if self.rooms is None else self.rooms[rows.start : rows.stop]
        with warnings.catch_warnings():
            if config.max_tokens > min(rooms):
                config = end_rows(config, rooms, decoder.config)
            if config.max_tokens > min(rooms):  # only rows that have ended exceed the context
                warnings.filterwarnings("ignore", r"position [\d,]+ exceeds")
            generations = generate(decoder, self.model.tokenizer, input_ids=ids, state=state, config=config)
        return [
            replace(g, stop_reason="length") if g.stop_reason == "cancelled" and len(g.token_ids) == room else g
            for g, room in zip(generations, rooms, strict=True)
        ]


def end_rows(config: GenerationConfig, rooms: Sequence[int], model: DecoderConfig) -> GenerationConfig:
    """Return options that cancel each row after as many tokens as it has room for."""
    # A learned table has no positions for rows that have ended and are read on as part of the batch.
    most = min(rooms) if model.position_encoding == "table" else max(rooms)
    max_tokens = min(config.max_tokens, most)
    counts = [0] * len(rooms)
    on_token = config.on_token

    def end_when_full(row: int, token: int, text: str, logprob: float) -> bool:
        counts[row] += 1
        is_cancelled = on_token is not None and on_token(row, token, text, logprob)
        return bool(is_cancelled) or counts[row] == rooms[row]

    min_tokens = min(config.min_tokens, max_tokens)
    return replace(config, max_tokens=max_tokens, min_tokens=min_tokens, on_token=end_when_full)
