"""A run that reads: texts become a memory, prompts are answered on it; `laconic.load`."""

import datetime
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

import laconic
from laconic.compression.autocompressor import AutoCompressor
from laconic.compression.halting.inference import RuleName
from laconic.compression.memory import SummaryMemory
from laconic.compression.memory_file import MemoryMetadata
from laconic.compression.segment import build_memory_prompt, resolve_position_scheme
from laconic.config.load import load_recipe
from laconic.data.tokenizer import Tokenizer
from laconic.errors import UsageError
from laconic.experiment.compress import CompressionJob, resolve_length_rule
from laconic.experiment.load_autocompressor import is_published, load_published
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun, is_run_dir, load_run
from laconic.experiment.resumable_stream import TokenStream
from laconic.generation.config import GREEDY, GenerationConfig
from laconic.generation.generate import Generation, generate
from laconic.generation.prompt import pad_left
from laconic.models import weights
from laconic.models.cache import KVCache
from laconic.models.decoder import Decoder


class MemoryPrompts(NamedTuple):
    """Prompts on a memory: their ids, the cache of what stands before them, and where each begins."""

    prompt_ids: list[list[int]]
    cache: KVCache | None
    positions: Int[Tensor, " B"] | None


@dataclass(frozen=True)
class TextCompressor:
    """An AutoCompressor with its tokenizer; `segment` is the length in tokens in which it was taught to read.

    `reads` and `writes` are fingerprints of the weights that do; the two differ where an adapter only writes.
    """

    method: AutoCompressor
    tokenizer: Tokenizer
    segment_tokens: int
    reader_fingerprint: str
    writer_fingerprint: str

    @property
    def decoder(self) -> Decoder:
        """What reads vectors."""
        return self.method.decoder

    @cached_property
    def metadata(self) -> MemoryMetadata:
        """What a memory that is written now comes from, its texts aside."""
        reading, halting, config = self.method.config, self.method.stop_head_config, self.decoder.config
        settings = {
            "compression": reading.model_dump(mode="json"),
            "stop_head": None if halting is None else halting.model_dump(mode="json"),
        }
        return MemoryMetadata(
            laconic=laconic.__version__,
            reader=self.reader_fingerprint,
            writer=self.writer_fingerprint,
            family=config.family,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            vocab=config.vocab_size,
            method=settings,
            positions=resolve_position_scheme(reading, config),
            bos=reading.bos
            if reading.bos is not None and self.method.segment_model.bos_token_id is not None
            else "none",
            recurrent=reading.reread_memory,
            dtype=str(self.decoder.token_embedding.weight.dtype).removeprefix("torch."),
            tokenizer=self.tokenizer.fingerprint,
            created=current_time(),
        )

    def compress(
        self,
        texts: Sequence[str],
        *,
        names: Sequence[str] = (),
        segment_tokens: int | None = None,
        stop_rule: RuleName | None = None,
        quantile: float | None = None,
        threshold: float | None = None,
        num_vectors: int | None = None,
        total_vectors: int | None = None,
        seed: int = 0,
    ) -> SummaryMemory:
        """A row of memory for each text, all read side by side.

        `stop` with `q` or `tau`, `n` of each segment, or a `budget` for a text say how many vectors there are; by
        default the run does. Raises `Usage` (2), and `BadInput` (66) for an empty text.
        """
        how = resolve_length_rule(
            self.method,
            stop_rule=stop_rule,
            quantile=quantile,
            threshold=threshold,
            num_vectors=num_vectors,
            total_vectors=total_vectors,
            seed=seed,
        )
        called = [*names] or [f"text {i}" for i in range(1, len(texts) + 1)]
        if isinstance(texts, str) or not texts or len(called) != len(texts):
            raise UsageError("texts: give a list of at least one text, and as many names as texts or none")
        group = [self.token_stream(name, [text], segment_tokens) for name, text in zip(called, texts, strict=True)]
        return self.run_to_end(CompressionJob(self.method, how), [group])

    def stream(self, parts: Iterable[str], *, name: str = "stream", segment_tokens: int | None = None) -> SummaryMemory:
        """One row of memory for a text that comes in parts, of any length, lengths as the run has them."""
        return self.run_to_end(
            CompressionJob(self.method, resolve_length_rule(self.method)),
            [[self.token_stream(name, parts, segment_tokens)]],
        )

    def token_stream(self, name: str, parts: Iterable[str], segment_tokens: int | None = None) -> TokenStream:
        """A text to be read in segments of the run's own length or another. Raises `Usage` (2) for less than one."""
        if segment_tokens is not None and segment_tokens < 1:
            raise UsageError(f"segment {segment_tokens}: give 1 token or more")
        return TokenStream(name, parts, self.tokenizer, segment_tokens or self.segment_tokens)

    def run_to_end(self, job: CompressionJob, groups: Iterable[Sequence[TokenStream]]) -> SummaryMemory:
        """All of some work done."""
        for _ in job.run(groups):
            pass
        return self.with_metadata(job)

    def with_metadata(self, job: CompressionJob) -> SummaryMemory:
        """What was made, with where it comes from. Raises `Usage` (2) where no text was given."""
        if job.done is None:
            raise UsageError("no text is given; give one to compress")
        return replace(job.done, metadata=replace(self.metadata, documents=tuple(job.documents)))

    def load(self, path: str | Path) -> SummaryMemory:
        """A memory that this run may read, in the decoder's type and place. Raises `Damaged` (76), `BadInput` (66)."""
        first = self.decoder.token_embedding.weight
        return SummaryMemory.load(path, self.metadata).to(first.device, first.dtype)

    def prepare_prompts(self, prompts: Sequence[str], memory: SummaryMemory) -> MemoryPrompts:
        """Prompts on a memory of as many rows, of one for all, or one prompt for all rows; a memory is read once.

        Raises `Usage` (2) for other numbers, and for a memory and a prompt that do not fit the model.
        """
        if memory.metadata is not None:
            memory.metadata.check_reader("the one given", self.metadata)
        given, B = [self.tokenizer.encode(text, add_special_tokens=False) for text in prompts], memory.B
        if len(given) != B and 1 not in (B, len(given)):
            raise UsageError(f"{len(given)} prompts on a memory of {B} texts; give one prompt, or as many as texts")
        ids = given * B if len(given) == 1 else given
        if not all(ids):
            raise UsageError(f"prompt {ids.index([])} is empty; give text")
        self.method.segment_model.check_fits(memory, max(map(len, ids)))
        _, live = pad_left(ids)
        with torch.no_grad(), self.reading_mode():
            state = self.prefill_memory(memory)
        state = state if state is None or len(ids) == B else state.repeat_rows(len(ids))
        many = memory if len(ids) == B else memory.select_rows([0] * len(ids))
        unit = self.method.segment_model
        placed = build_memory_prompt(
            self.decoder, unit.config, many, unit.bos_token_id, live.to(many.valid.device)
        ).position_ids
        return MemoryPrompts(ids, state, None if placed is None else placed[:, -1] + 1 - live.sum(1).to(placed.device))

    def prefill_memory(self, memory: SummaryMemory) -> KVCache | None:
        """The cache of a memory, and of what stands before it; None of nothing."""
        before = self.method.build_prompt(memory)
        if not before.inputs_embeds.shape[1]:
            return None
        output = self.decoder(
            before.inputs_embeds, attention_mask=before.attention_mask, position_ids=before.position_ids
        )
        return output.cache

    def reading_mode(self) -> AbstractContextManager[object]:
        """The decoder as it reads; an adapter that only writes is off."""
        return self.method.segment_model.reading_context()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What a text ends with: the tokenizer's eos, and others where the model's own files name it beside them."""
        ends, eos = self.decoder.config.eos_token_ids, self.tokenizer.eos_token_id
        return ends if eos is None or eos in ends else (eos,)

    def generate(
        self,
        prompts: Sequence[str],
        memory: SummaryMemory | None = None,
        *,
        config: GenerationConfig = GREEDY,
    ) -> list[Generation]:
        """Continue prompts on a memory: one prompt per row, one prompt for all rows, or one row for all prompts.

        `config` is as in :func:`laconic.generate`; by default rows end at the tokenizer's end-of-sequence ids.
        """
        found = MemoryPrompts([self.tokenizer.encode(text) for text in prompts], None, None)
        found = found if memory is None else self.prepare_prompts(prompts, memory)
        if config.eos_token_ids is None:
            config = replace(config, eos_token_ids=self.stop_token_ids)
        with self.reading_mode():
            return generate(
                self.decoder,
                self.tokenizer,
                input_ids=found.prompt_ids,
                state=found.cache,
                first_positions=found.positions,
                config=config,
            )


def load_compressor(path: str | Path, device: str = "cpu", step: int | None = None) -> TextCompressor:
    """The run of an AutoCompressor at its newest good step, or the one asked for; or the folder of a published one.

    Raises `BadInput` (66) for what is neither, `Usage` (2) for a run of another method, `Damaged` (76), and `Unsafe`
    (77) for pickles.
    """
    place = weights.resolve_device(device)
    if is_run_dir(path) or not is_published(path):
        return as_compressor(load_run(path, place, step))
    if step is not None:
        raise UsageError(f"step {step}: {path} is no run but a checkpoint, which has no steps; leave it out")
    found = load_published(path, place)
    whole = found.method.decoder.fingerprint
    return TextCompressor(
        found.method, found.tokenizer, found.segment_tokens, whole, compute_writer_fingerprint(found.method)
    )


def is_compressor(path: str | Path) -> bool:
    """Whether a folder is one that reads texts into memories: a run by its recipe, or a published AutoCompressor."""
    return (
        load_recipe(Path(path) / RECIPE_FILE)[0].method == "autocompressor" if is_run_dir(path) else is_published(path)
    )


def compute_writer_fingerprint(method: AutoCompressor) -> str:
    """The fingerprint of all that writes a memory: the decoder, and what is learned beside it."""
    learned = weights.weights_fingerprint(method.summaries.state_dict().items())
    return sha256(f"{method.decoder.fingerprint} {learned}".encode()).hexdigest()


def as_compressor(run: LoadedRun) -> TextCompressor:
    """An opened run as a reader. Raises `Usage` (2) for one whose method reads no texts."""
    method = run.method
    if not isinstance(method, AutoCompressor):
        raise UsageError(
            f"{run.folder} was trained by {run.recipe.method}, which keeps no memory; give a run of autocompressor"
        )
    reads = run.parts.base if method.config.adapter_scope == "write" else method.decoder.fingerprint
    data = run.recipe.data
    segment = data.recall.segment_tokens if data.source == "recall" else data.text.mean_segment_tokens
    return TextCompressor(method, run.parts.tokenizer, segment, reads, compute_writer_fingerprint(method))


def current_time() -> str:
    """The time, or what SOURCE_DATE_EPOCH says it is."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    when = datetime.datetime.now(datetime.UTC)
    when = datetime.datetime.fromtimestamp(int(given), datetime.UTC) if given.isdecimal() else when
    return when.isoformat(timespec="seconds")
