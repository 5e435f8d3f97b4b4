"""Read texts into the fast weights of a nested model, trained or a plain checkpoint, and generate text on them."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch

from laconic.config.nested import CMSConfig
from laconic.config.recipe import Recipe
from laconic.data.tokenizer import Tokenizer, load_tokenizer
from laconic.errors import UsageError
from laconic.experiment.from_recipe.untrained_levels import (
    UNTRAINED_CHUNK_SIZES,
    UNTRAINED_INNER_LR,
    UNTRAINED_UPDATE_RATIO,
    UntrainedLevels,
    check_writer,
    parse_level_options,
    read_writer_metadata,
)
from laconic.experiment.resumable_stream import TokenStream, pad_segments
from laconic.experiment.text_models.prompts import GeneratedText, PreparedPrompts, PromptRow, pair_with_texts
from laconic.experiment.text_models.read_into_state import (
    ReadDocument,
    StateReadingJob,
    load_read_documents,
    make_room,
    repeat_state,
    spread_documents,
)
from laconic.experiment.text_models.text_model import (
    check_memory_type,
    current_time,
    describe_decoder,
    find_stop_token_ids,
    list_texts,
    name_texts,
)
from laconic.generation.config import GREEDY, GenerationConfig, check_config, check_range, check_type
from laconic.generation.generate import Generation, generate
from laconic.models.decoder import Decoder
from laconic.nested import state as values
from laconic.nested import state_file
from laconic.nested.hope.model import Hope, HopeAttention
from laconic.nested.state import FastWeightState
from laconic.nested.state_check import check_cache_dtype, check_model_key, check_waiting_tokens

READING_CHUNK = 512  # tokens of a segment; the result does not depend on it
OnReading = Callable[[int, int, float], None]


@dataclass(frozen=True)
class NestedTextModel:
    """A nested model with its tokenizer, as `laconic.load` and `from_pretrained` return it.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        update_weights: Whether fast weights are updated while reading; False if they were frozen in training.
        recipe: Recipe of the run; None for a saved model.
        untrained: The levels that `from_pretrained` put on a plain checkpoint; None for a trained model.

    Examples:
        >>> import laconic
        >>> model = laconic.load("runs/hope")
        >>> state = model.compress(["A long text, which changes the fast weights."])
        >>> generation = model.generate(["Q: Who arrived? A:"], memory=state)[0]
        >>> generation.stop_reason in ("eos", "length")
        True
    """

    model: Hope
    tokenizer: Tokenizer
    update_weights: bool = True
    recipe: Recipe | None = None
    untrained: UntrainedLevels | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        *,
        inner_lr: float = UNTRAINED_INNER_LR,
        chunk_sizes: Sequence[int] = UNTRAINED_CHUNK_SIZES,
        max_update_ratio: float = UNTRAINED_UPDATE_RATIO,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        revision: str | None = None,
    ) -> "NestedTextModel":
        """Load a plain checkpoint whose MLPs learn while it reads, without any training.

        Each MLP becomes a level of a continuum memory system and is updated at the end of every chunk, by the gradient
        of the next token's loss. Until it has read a chunk, the model gives the checkpoint's logits, bit for bit.

        Args:
            path_or_name: A checkpoint as `laconic.Decoder.from_pretrained` takes it.
            inner_lr: Learning rate for the mean gradient of a chunk.
            chunk_sizes: Tokens between two updates; several are spread over the layers, the smallest first.
            max_update_ratio: Largest norm of an update, as a share of the norm of the weights; 0 does not limit it.
            device: Device of the model.
            dtype: Type of the weights.
            revision: Commit, tag or branch on the hub.

        Raises:
            UsageError: If an option is out of range.
            InputError: If there is no such checkpoint.

        Examples:
            >>> import laconic
            >>> model = laconic.NestedTextModel.from_pretrained("stories260k")
            >>> state = model.compress(["Once upon a time there was a dragon. " * 20])
            >>> state.layers[0].cms.levels[0].num_updates.tolist()
            [4]
        """
        default = f"default: {UNTRAINED_INNER_LR:g}"
        check_type("inner_lr", inner_lr, int | float, f"a number ({default})")
        check_range("inner_lr", inner_lr, inner_lr >= 0, f"at least 0 ({default})")
        levels = parse_level_options(
            {"inner_lr": inner_lr, "chunk_sizes": chunk_sizes, "max_update_ratio": max_update_ratio}
        )
        decoder = Decoder.from_pretrained(path_or_name, dtype, device, revision=revision)
        return cls.from_decoder(decoder, load_tokenizer(decoder.source_folder or path_or_name), levels)

    @classmethod
    def from_decoder(cls, decoder: Decoder, tokenizer: Tokenizer, levels: CMSConfig) -> "NestedTextModel":
        """Put `levels` on the MLPs of a plain `decoder`, whose tensors are shared, with its `tokenizer`."""
        model = HopeAttention.from_decoder(decoder, levels.chunk_sizes, options=levels.options)
        return cls(model, tokenizer, untrained=UntrainedLevels(levels, decoder.fingerprint))

    @property
    def decoder(self) -> Hope:
        """The model, under the name that other loaded models have for theirs."""
        return self.model

    @property
    def has_attention(self) -> bool:
        """Whether the model has attention, and so can condition on a text without updating fast weights."""
        return self.model.hope_config.memory is None

    @cached_property
    def attention_window(self) -> int:
        """Largest number of tokens that attention sees."""
        return self.model.config.max_position_embeddings

    def compress(
        self, texts: Sequence[str], state: FastWeightState | str | Path | None = None, *, names: Sequence[str] = ()
    ) -> FastWeightState:
        """Read texts into fast weights, one row per text, all in parallel.

        Args:
            texts: The texts.
            state: State that every text continues, or of one row per text, or its file; by default the initial one.
            names: Names stored in the state's file.

        Raises:
            UsageError: If the model's fast weights are frozen, or the state has another number of rows.
            InputError: For an empty text.
            NonFiniteError: If a fast weight is not finite.
        """
        named_texts = name_texts(texts, names)
        job = self.start_reading(self.open_state(state), len(named_texts))
        streams = [self.token_stream(name, [text], state is None) for name, text in named_texts]
        return self.sign(job.finish([streams]))

    def stream(self, chunks: Iterable[str], state: FastWeightState | str | Path | None = None) -> FastWeightState:
        """Read one text that arrives in `chunks` of any size into a state of one row, which continues `state`."""
        job = self.start_reading(self.open_state(state))
        return self.sign(job.finish([[self.token_stream("stream", chunks, state is None)]]))

    def open_state(self, state: FastWeightState | str | Path | None) -> FastWeightState | None:
        """Return a state, loaded if it is the path of a file. Raises `UsageError` for one of another kind or model."""
        state = self.load_memory(state) if isinstance(state, str | Path) else state
        if state is not None:
            check_memory_type(state, FastWeightState)
            check_waiting_tokens(state, self.model.hope_config.chunk_sizes)
            check_cache_dtype(state, self.model.dtype)
            check_model_key(state, self.key)
        return state

    @property
    def key(self) -> str:
        """Hash of the weights, the tokenizer and the levels, which states carry in memory."""
        levels = self.model.hope_config.chunk_sizes if self.untrained is None else self.untrained.levels
        return sha256(f"{self.model.fingerprint} {self.tokenizer.fingerprint} {levels}".encode()).hexdigest()

    @property
    def source(self) -> dict[str, Any]:
        """What a state's file says of the model that wrote it, beside the hash of the weights."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        source: dict[str, Any] = {"tokenizer": self.tokenizer.fingerprint, "weights_dtype": dtype}
        if self.untrained is not None:
            source |= {"checkpoint": self.untrained.checkpoint, "levels": self.untrained.levels.model_dump(mode="json")}
        return source

    def sign(self, state: FastWeightState) -> FastWeightState:
        """Return a state that says that this model has read it."""
        return replace(state, model_key=self.key)

    def start_reading(self, initial_state: FastWeightState | None = None, num_texts: int = 1) -> StateReadingJob:
        """Return a job that reads `num_texts` texts, which continue `initial_state`: one row for all, or for each."""
        if not self.update_weights:
            raise UsageError("inner_loop.enabled is false in this run, so it cannot learn from a text; use another run")
        num_rows = 1 if initial_state is None else len(initial_state.position)
        if num_rows not in (1, num_texts):
            raise UsageError(f"a state of {num_rows:,} texts is continued by as many, in order; {num_texts:,} given")
        return StateReadingJob(self.model, self.attention_window, initial_state)

    @property
    def segment_tokens(self) -> int:
        """Tokens that are read at once."""
        return min(READING_CHUNK, self.attention_window) if self.has_attention else READING_CHUNK

    def token_stream(self, name: str, chunks: Iterable[str], is_new: bool = True) -> TokenStream:
        """Return the text `name` in `chunks` as tokens; with `is_new`, it begins with BOS if the checkpoint adds it."""
        special_ids = self.tokenizer.encode("") if is_new and self.untrained is not None else []
        prefix = special_ids if special_ids == [self.tokenizer.bos_token_id] else []
        return TokenStream(name, chunks, self.tokenizer, self.segment_tokens, prefix)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return find_stop_token_ids(self.tokenizer, self.model.config)

    def generate(
        self,
        prompts: Sequence[str] | str,
        config: GenerationConfig = GREEDY,
        *,
        memory: FastWeightState | str | Path | None = None,
    ) -> list[Generation]:
        """Continue prompts on a state: one prompt per row, one prompt for all rows, or one row for all prompts.

        With `config.update_on_prompt` the prompt updates the fast weights; a model without attention always updates
        them, because it could not condition on the prompt otherwise.

        Args:
            prompts: Texts, or one text; on a state they are encoded without special tokens such as BOS.
            config: As in `laconic.generate`; by default rows end at the tokenizer's end-of-sequence ids.
            memory: State to continue from, which is never changed, or the path of a file that `save` wrote.

        Returns:
            One `Generation` per prompt or row; its `state` is the state after that row.

        Raises:
            UsageError: The numbers of prompts and rows do not fit, and as in `laconic.generate`.
            CorruptArtifactError: If the file is damaged or belongs to another model.
        """
        check_config(config)
        prepared = self.prepare([PromptRow("the prompt", text) for text in list_texts("prompts", prompts)], memory)
        return prepared.generate(range(len(prepared.prompts)), config)

    def prepare(
        self, prompts: Sequence[PromptRow], memory: FastWeightState | str | Path | None = None
    ) -> "StatePrompts":
        """Encode `prompts` that continue the state `memory`, as for `generate`; the errors are its errors."""
        state = self.open_state(memory)
        documents = load_read_documents(memory) if isinstance(memory, str | Path) else []
        prompts = prompts if state is None else pair_with_texts(prompts, len(state.position), documents)
        ids = [prompt.encode(self.tokenizer, is_continuation=state is not None) for prompt in prompts]
        return StatePrompts(prompts, ids, self, state, documents)

    def generate_from_ids(
        self,
        ids: Sequence[Sequence[int]],
        state: FastWeightState | None = None,
        config: GenerationConfig = GREEDY,
        on_reading: OnReading | None = None,
    ) -> list[Generation]:
        """Continue prompts, given as `ids`, from a `state` of one row or as many, as `generate` does with `config`.

        While a prompt updates the fast weights, `on_reading` is called with the tokens read, their total, and the nats
        per token.
        """
        state = repeat_state(state, len(ids))
        if not self.update_weights:
            config = replace(config, update_on_prompt=False, update_on_output=False)
        if config.eos_token_ids is None:
            config = replace(config, eos_token_ids=self.stop_token_ids)
        lengths = list(map(len, ids))
        is_learning = bool(config.update_on_prompt) and max(lengths, default=0) > 1
        if state is not None and lengths:
            state = make_room(self.model, state, lengths, config.max_tokens, self.attention_window, is_learning)
        if is_learning:
            room = max(self.attention_window - config.max_tokens - 1, self.segment_tokens)
            state = self.read_ids([row[:-1] for row in ids], state, room, on_reading)
            ids = [row[-1:] for row in ids]
        results = generate(self.model, self.tokenizer, input_ids=ids, state=state, config=config)
        finals = [cast(FastWeightState | None, result.final_state) for result in results]
        return [
            replace(result, num_prompt_tokens=n, final_state=final and self.sign(final))
            for result, final, n in zip(results, finals, lengths, strict=True)
        ]

    def read_ids(
        self,
        rows: Sequence[Sequence[int]],
        state: FastWeightState | None = None,
        window: int | None = None,
        on_reading: OnReading | None = None,
    ) -> FastWeightState:
        """Read ids into fast weights, one row each, on a state of one row or as many; see `generate_from_ids`."""
        job = StateReadingJob(self.model, window or self.attention_window, repeat_state(state, len(rows)))
        n = self.segment_tokens
        total = max(map(len, rows))
        if on_reading is not None:
            on_reading(0, total, 0.0)
        for start in range(0, total, n):
            job.current = job.advance(pad_segments([row[start : start + n] for row in rows], job.device))
            if on_reading is not None:
                on_reading(min(total, start + n), total, job.loss.mean)
        assert job.current is not None
        return job.current

    def save(
        self,
        state: FastWeightState,
        path: str | Path,
        documents: Sequence[Sequence[ReadDocument]] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a state to a file that only these weights and this tokenizer can open; an old file is replaced.

        Args:
            state: The state.
            path: The file.
            documents: Texts that each row has read.
            dtype: Type of the numbers in the file. By default a loaded state equals the saved one bit for bit.

        Raises:
            UsageError: If another model has read it.
            NonFiniteError: If the state is not finite.
            DiskError: If the disk is full.
        """
        check_type("state", state, FastWeightState, "a state and then its path, save(state, path)")
        check_model_key(state, self.key)
        source = {
            **self.source,
            "created": current_time(),
            "documents": [[document._asdict() for document in row] for row in documents],
            "chunks": self.model.hope_config.chunk_sizes,
        }
        stored = values.to(values.detach(state), dtype=dtype)
        state_file.save_state(stored, path, model_fingerprint=self.model.weights_fingerprint, source=source)

    def load_memory(self, path: str | Path) -> FastWeightState:
        """Read a state that `save` wrote. Raises CorruptArtifactError if it is damaged, or of another model."""
        check_writer(path, read_writer_metadata(path), self.source)
        state = self.model.load_state(path)
        return self.sign(values.to(state_file.restore_dtypes(state, self.model.dtype), self.model.device))

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, sorted({size for layer in self.model.hope_config.chunk_sizes for size in layer})))
        return f"NestedTextModel({describe_decoder(self.model)}, levels of {sizes} tokens)"


@dataclass(frozen=True)
class StatePrompts(PreparedPrompts):
    """Prompts of a `NestedTextModel`, after a state of one row for all, or one for each.

    `documents` are the texts that each row of the state has read; `on_reading` is as in `generate_from_ids`.
    """

    model: NestedTextModel
    state: FastWeightState | None = None
    documents: Sequence[Sequence[ReadDocument]] = ()
    on_reading: OnReading | None = None

    def generate(self, rows: range, config: GenerationConfig) -> list[Generation]:
        state = self.state
        if state is not None and len(state.position) > 1:
            state = values.select_rows(state, list(rows))
        return self.model.generate_from_ids(self.ids[rows.start : rows.stop], state, config, self.on_reading)

    def read(self) -> FastWeightState:
        """Return the state after all prompts, without generating anything."""
        return self.model.read_ids(self.ids, self.state, on_reading=self.on_reading)

    def save_state(
        self, path: Path, generations: Sequence[GeneratedText], state: FastWeightState | None = None
    ) -> FastWeightState:
        """Write and return the state after prompts and generations; `state` is that of `read`, if nothing follows.

        Prompt and answer become a text in the file that each row has read.
        """
        if state is None:
            state = values.concat_rows(*(cast(FastWeightState, cast(Any, g).state) for g in generations))
        documents = spread_documents(self.documents, len(self.prompts))
        answers = [(g.text, len(g.token_ids)) for g in generations] or [("", 0)] * len(self.prompts)
        for row, prompt, ids, (answer, num_tokens) in zip(documents, self.prompts, self.ids, answers, strict=True):
            text = (json.dumps(prompt.messages) if prompt.text is None else prompt.text) + answer
            row.append(ReadDocument("prompt and answer", sha256(text.encode()).hexdigest(), len(ids) + num_tokens))
        self.model.save(state, path, documents)
        return state
