"""Compress texts into summary vectors with a trained AutoCompressor, and generate text on them."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

import laconic
from laconic.batches.padding import pad_rows
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import MemoryMetadata
from laconic.compression.segment import resolve_position_scheme
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.compress import CompressionJob, SummaryLength
from laconic.experiment.load_run import LoadedRun
from laconic.experiment.resumable_stream import TokenStream
from laconic.experiment.text_models.chat_session import ChatPrefix
from laconic.experiment.text_models.document_reasoning import DocumentReasoning
from laconic.experiment.text_models.prompts import PreparedPrompts, PromptRow, pair_with_texts
from laconic.experiment.text_models.text_model import (
    check_is_one_text,
    check_memory_type,
    current_time,
    describe_decoder,
    find_stop_token_ids,
    list_texts,
    match_prompts,
    name_texts,
)
from laconic.generation.config import GREEDY, GenerationConfig, check_config, check_type
from laconic.generation.generate import Generation, generate
from laconic.models.cache import KVCache
from laconic.models.checkpoints import weights
from laconic.models.decoder import Decoder


class MemoryPrompts(NamedTuple):
    """Prompts that follow a memory: their ids, the cache of the memory, and each prompt's first position id."""

    prompt_ids: list[list[int]]
    cache: KVCache | None
    positions: Int[Tensor, " B"] | None


@dataclass(frozen=True)
class TextCompressor:
    """An AutoCompressor with its tokenizer, as `laconic.load` returns it.

    Attributes:
        method: The model.
        tokenizer: Its tokenizer.
        segment_tokens: Length of the segments it was trained on.
        reader_fingerprint: Fingerprint of the weights that read a memory.
        writer_fingerprint: Fingerprint of the weights that write one; another if a LoRA adapter only writes.
        recipe: Recipe of the run; None for a published checkpoint.

    Examples:
        >>> import laconic
        >>> compressor = laconic.load("runs/autocompressor")
        >>> memory = compressor.compress(["A long text of several segments, which becomes a few vectors."])
        >>> generation = compressor.generate(["Q: Who arrived? A:"], memory=memory)[0]
        >>> generation.stop_reason in ("eos", "length")
        True
    """

    method: AutoCompressor
    tokenizer: Tokenizer
    segment_tokens: int
    reader_fingerprint: str
    writer_fingerprint: str
    recipe: Recipe | None = None

    @property
    def decoder(self) -> Decoder:
        """The decoder that reads summary vectors."""
        return self.method.decoder

    @cached_property
    def metadata(self) -> MemoryMetadata:
        """Metadata of a memory that is written now, without its texts."""
        config, stop_head, decoder = self.method.config, self.method.stop_head_config, self.decoder.config
        has_bos = config.bos is not None and self.method.segment_model.bos_token_id is not None
        return MemoryMetadata(
            laconic=laconic.__version__,
            reader=self.reader_fingerprint,
            writer=self.writer_fingerprint,
            family=decoder.family,
            layers=decoder.num_hidden_layers,
            width=decoder.hidden_size,
            vocab=decoder.vocab_size,
            method={
                "compression": config.model_dump(mode="json"),
                "stop_head": None if stop_head is None else stop_head.model_dump(mode="json"),
            },
            positions=resolve_position_scheme(config, decoder),
            bos=config.bos if config.bos is not None and has_bos else "none",
            dtype=str(self.decoder.dtype).removeprefix("torch."),
            tokenizer=self.tokenizer.fingerprint,
            created=current_time(),
        )

    def compress(
        self,
        texts: Iterable[str] | str,
        length: SummaryLength | None = None,
        *,
        names: Sequence[str] = (),
        segment_tokens: int | None = None,
    ) -> SummaryMemory:
        """Compress texts into a memory with one row per text, reading all texts in parallel.

        Args:
            texts: The texts, or one.
            length: Number of vectors; by default as trained.
            names: Names stored in the memory's metadata.
            segment_tokens: Length of segments; by default as trained.

        Raises:
            UsageError: If the texts or the number of vectors do not fit the model.
            InputError: For an empty text.
        """
        if not isinstance(length, SummaryLength | None):
            raise UsageError(f"length: give length=laconic.SummaryLength(num_vectors=…), not {type(length).__name__}")
        group = [self.token_stream(name, [text], segment_tokens) for name, text in name_texts(texts, names)]
        job = CompressionJob(self.method, length)
        job.finish([group])
        return self.with_metadata(job)

    def stream(
        self, chunks: Iterable[str], *, name: str = "stream", segment_tokens: int | None = None
    ) -> SummaryMemory:
        """Compress one text that arrives in chunks, of any total length, into a memory of one row.

        Args:
            chunks: The text, in pieces of any size.
            name: Name of the text, for messages and metadata.
            segment_tokens: Tokens per segment, by default as in training.

        Raises:
            InputError: If the text is empty.
            UsageError: If the memory does not fit the model.
        """
        job = CompressionJob(self.method)
        job.finish([[self.token_stream(name, chunks, segment_tokens)]])
        return self.with_metadata(job)

    def token_stream(self, name: str, chunks: Iterable[str], segment_tokens: int | None = None) -> TokenStream:
        """Return the text `name` in `chunks` as segments of `segment_tokens`, by default as many as in training."""
        if segment_tokens is not None and segment_tokens < 1:
            raise UsageError(f"segment_tokens {segment_tokens}: give 1 or more")
        return TokenStream(name, chunks, self.tokenizer, segment_tokens or self.segment_tokens)

    def with_metadata(self, job: CompressionJob) -> SummaryMemory:
        """Return the memory of a finished job with its metadata."""
        assert job.done is not None
        metadata = replace(self.metadata, created=current_time(), documents=tuple(job.documents))
        return replace(job.done, metadata=metadata)

    def save(self, memory: SummaryMemory, path: str | Path) -> None:
        """Write a `memory` of this model to a file at `path`."""
        memory.save(path)

    def load_memory(self, path: str | Path) -> SummaryMemory:
        """Read a file of `save` or `laconic compress` that this model may read, with the decoder's dtype and device.

        Raises:
            CorruptArtifactError: If the file is damaged or was written for other weights.
            InputError: If there is no such file.
        """
        return SummaryMemory.load(path, self.metadata).to(self.decoder.device, self.decoder.dtype)

    def prepare_prompts(self, prompts: Sequence[str], memory: SummaryMemory) -> MemoryPrompts:
        """Encode `prompts` that follow a `memory`: one per row, one for all rows, or one row for all prompts."""
        check_memory_type(memory, SummaryMemory)
        if memory.metadata is not None:
            memory.metadata.check_reader("the one given", self.metadata)
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in prompts]
        B = memory.B
        ids = match_prompts(ids, B)
        if not all(ids):
            raise UsageError(f"prompt {ids.index([])} is empty; give text")
        model = self.method.segment_model
        model.check_fits(memory, max(map(len, ids)))
        with torch.no_grad(), self.reading_mode():
            cache = model.prefill_memory(memory)
        if cache is not None and len(ids) != B:
            cache = cache.repeat_rows(len(ids))
        rows = memory if len(ids) == B else memory.select_rows([0] * len(ids))
        mask = pad_rows(ids, pad_left=True, device=rows.valid.device).attention_mask
        positions = model.build_prompt(rows, mask).position_ids
        return MemoryPrompts(ids, cache, None if positions is None else positions[:, -1] + 1 - mask.sum(1))

    def prompt_embeddings(self, memory: SummaryMemory, prompt: str | None = None) -> Float[Tensor, "T D"]:
        """Return the embeddings of a `memory` of one text and a `prompt`, if any, as servers take them.

        In vLLM they are `prompt_embeds`.

        Raises:
            UsageError: If the memory has several texts or positions that are not consecutive, which a server gives to
                all embeddings; or if memory and prompt do not fit the model.
        """
        if memory.B != 1:
            advice = "compress one text, or in Python select it by memory.select_rows([0])"
            raise UsageError(f"a memory of {memory.B} texts, but prompt embeddings are of one; {advice}")
        config, decoder = self.method.config, self.decoder
        scheme = resolve_position_scheme(config, decoder.config)
        if scheme != "contiguous":
            raise UsageError(
                f'summary_positions "{scheme}": the summary vectors have other positions than consecutive ones, which '
                "is all that prompt embeddings can have; use laconic generate --memory"
            )
        ids = [] if prompt is None else self.prepare_prompts([prompt], memory).prompt_ids[0]
        with torch.no_grad(), self.reading_mode():
            before = self.method.build_prompt(memory)
            text = decoder.embed(torch.tensor([ids], dtype=torch.long, device=before.inputs_embeds.device))
        return torch.cat([before.inputs_embeds[before.attention_mask], text[0]])

    def reading_mode(self) -> AbstractContextManager[object]:
        """Return a context in which an adapter that only writes is off."""
        return self.method.segment_model.reading_context()

    def open_prefix(self, sources: Sequence[SummaryMemory | str | Path]) -> ChatPrefix | None:
        """Return joined memories of one text as the beginning of a conversation; None if they have no vectors."""
        memory = self.join_memories(sources)
        check_is_one_text(memory.B)
        prompt = self.prepare_prompts(["a"], memory)
        position = None if prompt.positions is None else int(prompt.positions[0])
        return prompt.cache and ChatPrefix(prompt.cache, position, reading_mode=self.reading_mode)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return find_stop_token_ids(self.tokenizer, self.decoder.config)

    def join_memories(
        self, sources: SummaryMemory | str | Path | Sequence[SummaryMemory | str | Path]
    ) -> SummaryMemory:
        """Load the memories that are files, and concatenate all, oldest first. Raises `UsageError` without any."""
        sources = [sources] if isinstance(sources, SummaryMemory | str | Path) else sources
        check_type("memory", sources, Sequence, "a SummaryMemory, its file, or a list of them")
        if not sources:
            raise UsageError("memory: the list is empty; give at least one memory, or None")
        memories = [self.load_memory(source) if isinstance(source, str | Path) else source for source in sources]
        for memory in memories:
            check_memory_type(memory, SummaryMemory)
        return memories[0] if len(memories) == 1 else SummaryMemory.concat_segments(*memories)

    def generate(
        self,
        prompts: Iterable[str] | str,
        config: GenerationConfig = GREEDY,
        *,
        memory: SummaryMemory | str | Path | Sequence[SummaryMemory | str | Path] | None = None,
    ) -> list[Generation]:
        """Continue prompts on a memory: one prompt per row, one prompt for all rows, or one row for all prompts.

        Args:
            prompts: Texts, or one text.
            config: As in `laconic.generate`; by default rows end at the tokenizer's end-of-sequence ids.
            memory: A memory, or the path of a file that `save` wrote; several are joined, oldest first; None for none.

        Returns:
            One `Generation` per prompt or row.

        Raises:
            UsageError: If the numbers of prompts and rows do not fit, or a prompt and the memory exceed the context.
            CorruptArtifactError: If the file is damaged or belongs to another model.
        """
        check_config(config)
        texts = list_texts("prompts", prompts)
        if not texts:
            return []
        if memory is None:
            encoded = MemoryPrompts([self.tokenizer.encode(text) for text in texts], None, None)
        else:
            encoded = self.prepare_prompts(texts, self.join_memories(memory))
        if config.eos_token_ids is None:
            config = replace(config, eos_token_ids=self.stop_token_ids)
        with self.reading_mode():
            return generate(
                self.decoder,
                self.tokenizer,
                input_ids=encoded.prompt_ids,
                state=encoded.cache,
                first_positions=encoded.positions,
                config=config,
            )

    def prepare(
        self,
        prompts: Sequence[PromptRow],
        memory: SummaryMemory | str | Path | Sequence[SummaryMemory | str | Path] | None = None,
    ) -> "SummaryPrompts":
        """Encode `prompts`, which are texts, after a `memory`, as for `generate`; the errors are its errors."""
        joined = None if memory is None else self.join_memories(memory)
        if joined is not None:
            prompts = pair_with_texts(prompts, joined.B, joined.metadata.documents if joined.metadata else ())
        ids = [prompt.encode(self.tokenizer, is_continuation=joined is not None) for prompt in prompts]
        if joined is not None:
            self.method.segment_model.check_fits(joined, max(map(len, ids)))
        return SummaryPrompts(prompts, ids, self, joined)

    def __repr__(self) -> str:
        return f"TextCompressor({describe_decoder(self.decoder)}, up to {self.method.config.max_vectors} vectors)"


@dataclass(frozen=True)
class SummaryPrompts(PreparedPrompts):
    """Prompts of a `TextCompressor`, after the texts of a memory: one for all, or one for each."""

    model: TextCompressor
    memory: SummaryMemory | None = None

    def generate(self, rows: range, config: GenerationConfig) -> list[Generation]:
        memory = self.memory
        if memory is not None and memory.B > 1:
            memory = memory.select_rows(list(rows))
        return self.model.generate([self.prompts[row].text or "" for row in rows], config, memory=memory)


def compute_writer_fingerprint(method: AutoCompressor) -> str:
    """Return the fingerprint of everything that writes a memory: the decoder and the summary parameters."""
    parameters = weights.weights_fingerprint(method.summaries.state_dict().items())
    return sha256(f"{method.decoder.fingerprint} {parameters}".encode()).hexdigest()


def as_compressor(run: LoadedRun) -> TextCompressor:
    """Return a loaded run as a `TextCompressor`. Raises `UsageError` if the run's method does not compress."""
    method, data = run.method, run.recipe.data
    if isinstance(method, DocumentReasoning):
        method = method.compressor
    if not isinstance(method, AutoCompressor):
        raise UsageError(f"{run.folder} was trained by {run.recipe.method}, which writes no memory; load another run")
    reader = run.parts.base if method.config.adapter_scope == "write" else method.decoder.fingerprint
    segment_tokens = data.recall.segment_tokens if data.source == "recall" else data.text.mean_segment_tokens
    segment_tokens = data.segment_tokens if run.recipe.reads_documents else segment_tokens
    writer = compute_writer_fingerprint(method)
    return TextCompressor(method, run.parts.tokenizer, segment_tokens, reader, writer, run.recipe)
