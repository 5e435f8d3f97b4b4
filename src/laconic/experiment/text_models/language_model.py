"""A plain language model: continue texts with a checkpoint, or with the decoder that a run trained."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from laconic.compression.kv.compress import DEFAULT_CONFIG, KVCompressionConfig
from laconic.compression.kv.memory import KVMemory
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.experiment.export import export_model
from laconic.experiment.text_models.kv_compressor import (
    MemorySource,
    build_row_caches,
    compress_text,
    encode_prompt,
    is_chat_memory,
    load_kv_memories,
)
from laconic.experiment.text_models.text_model import (
    describe_decoder,
    find_stop_token_ids,
    list_texts,
    match_prompts,
    name_texts,
)
from laconic.generation.config import GREEDY, GenerationConfig, check_config
from laconic.generation.generate import Generation, generate
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
        memory = load_kv_memories(memory, self.decoder, self.tokenizer)
        texts = match_prompts(list_texts("prompts", prompts), memory.B)
        if config.eos_token_ids is None and is_chat_memory(memory):
            eos = find_stop_token_ids(self.tokenizer, self.decoder.config, is_reply=True)
            config = replace(config, eos_token_ids=eos)
        ids = [encode_prompt(self.tokenizer, memory, text) for text in texts]
        state = build_row_caches(memory, range(len(ids)))
        return generate(self.decoder, self.tokenizer, input_ids=ids, state=state, config=config)

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

    def save(self, folder: str | Path) -> None:
        """Write the model as a Hugging Face folder, new or empty, which transformers and `laconic.load` read.

        Raises:
            BusyError: If the folder is not empty.
            DiskError: If the disk is full.
        """
        export_model(self.decoder, folder, self.tokenizer)

    def __repr__(self) -> str:
        return f"LanguageModel({describe_decoder(self.decoder)})"
