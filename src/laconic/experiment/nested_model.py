"""A model that learns while it reads, with its tokenizer: texts become a state, on which prompts are answered."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

import laconic
from laconic.config.load import load_recipe
from laconic.data.tokenizer import Tokenizer, load_tokenizer
from laconic.errors import CorruptArtifactError, UsageError
from laconic.experiment import build_nested
from laconic.experiment import compressor as reading
from laconic.experiment.compressor import TextCompressor, current_time
from laconic.experiment.load_run import RECIPE_FILE, LoadedRun, is_run_dir, load_run
from laconic.experiment.read_into_state import ReadDocument, StateReadingJob, fit_attention_window
from laconic.experiment.resumable_stream import TokenStream
from laconic.generation.config import GREEDY, GenerationConfig
from laconic.generation.generate import Generation, generate
from laconic.models import weights
from laconic.nested import state as values
from laconic.nested import state_file
from laconic.nested.hope.model import STATE_KIND, Hope
from laconic.nested.state import FastWeightState
from laconic.storage import atomic

NESTED_METHOD = "hope"
READING_CHUNK = 512  # tokens of a text read at once; what is learned does not depend on it
MAX_LISTED = 12  # characters of a hash that a message shows


@dataclass(frozen=True)
class NestedTextModel:
    """A Hope with its tokenizer. `learn` False: it was trained with fast weights that stand still, and reads so."""

    model: Hope
    tokenizer: Tokenizer
    update_weights: bool = True

    @property
    def has_attention(self) -> bool:
        """Whether it has attention, and sees a text without learning of it."""
        return self.model.hope_config.memory is None

    @cached_property
    def attention_window(self) -> int:
        """Tokens that attention sees at most."""
        return self.model.config.max_position_embeddings

    def compress(
        self, texts: Sequence[str], state: FastWeightState | None = None, *, names: Sequence[str] = ()
    ) -> FastWeightState:
        """What is learned of each text, a row each, all read side by side; on `state` of one row if it is given.

        Raises `Usage` (2), `BadInput` (66) for an empty text, `NonFinite` (65).
        """
        called = [*names] or [f"text {i}" for i in range(1, len(texts) + 1)]
        if isinstance(texts, str) or not texts or len(called) != len(texts):
            raise UsageError("texts: give a list of at least one text, and as many names as texts or none")
        study = self.start_reading(state)
        return run_to_end(study, [[self.token_stream(name, [text]) for name, text in zip(called, texts, strict=True)]])

    def stream(self, parts: Iterable[str], state: FastWeightState | None = None) -> FastWeightState:
        """One row for a text that comes in parts, of any length."""
        return run_to_end(self.start_reading(state), [[self.token_stream("stream", parts)]])

    def start_reading(self, before: FastWeightState | None = None) -> StateReadingJob:
        """Texts to be read. Raises `Usage` (2) for a model that has learned to stand still, and for other rows."""
        if not self.update_weights:
            raise UsageError(
                "inner_loop.enabled is false in this run: its fast weights stand still; give a run that learns"
            )
        if before is not None and len(before.position) != 1:
            raise UsageError(f"a state of {len(before.position)} rows before a text; take the row that it goes on from")
        return StateReadingJob(self.model, self.attention_window, before)

    def token_stream(self, name: str, parts: Iterable[str]) -> TokenStream:
        """A text, read in pieces."""
        return TokenStream(
            name,
            parts,
            self.tokenizer,
            min(READING_CHUNK, self.attention_window) if self.has_attention else READING_CHUNK,
        )

    def generate(
        self,
        prompts: Sequence[str],
        state: FastWeightState | None = None,
        *,
        config: GenerationConfig = GREEDY,
    ) -> list[Generation]:
        """Continue prompts on a state: one prompt per row, one prompt for all rows, or one row for all prompts.

        `config` is as in :func:`laconic.generate`; by default rows end at the tokenizer's end-of-sequence ids. With
        `config.update_on_prompt` the prompt updates the fast weights; a model without attention always updates them,
        because it could not condition on the prompt otherwise. The given state is never changed; each
        `Generation.state` is the state after its row.

        Raises:
            UsageError: The numbers of prompts and rows do not fit, and as in `laconic.generate`.
        """
        ids = [self.tokenizer.encode(text) for text in prompts]
        if state is not None:
            rows = len(state.position)
            if len(ids) != rows and 1 not in (rows, len(ids)):
                raise UsageError(f"{len(ids)} prompts on a state of {rows} rows; pass one prompt, or one per row")
            ids = ids * rows if len(ids) == 1 else ids
            state = values.select_rows(state, [0] * len(ids)) if rows == 1 else state
            num_positions = max(map(len, ids)) + config.max_tokens
            state = fit_attention_window(self.model, state, num_positions, self.attention_window)
        if config.eos_token_ids is None:
            config = replace(config, eos_token_ids=self.stop_token_ids)
        if not self.update_weights:
            config = replace(config, update_on_prompt=False, update_on_output=False)
        return generate(self.model, self.tokenizer, input_ids=ids, state=state, config=config)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What a text ends with: the tokenizer's eos, and others where the model's own files name it beside them."""
        ends, eos = self.model.config.eos_token_ids, self.tokenizer.eos_token_id
        return ends if eos is None or eos in ends else (eos,)

    def save(self, state: FastWeightState, path: str | Path, documents: Sequence[Sequence[ReadDocument]] = ()) -> None:
        """A state as one file that these weights open, with this tokenizer. Raises `NonFinite` (65), `NoSpace` (74).

        `documents` are what each row has read.
        """
        rows = [[document._asdict() for document in row] for row in documents]
        source = {"tokenizer": self.tokenizer.fingerprint, "created": current_time(), "documents": rows,
                  "chunks": self.model.hope_config.chunk_sizes}  # fmt: skip
        state_file.save_state(
            values.detach(state), path, memory_kind=STATE_KIND, model_fingerprint=self.model.weights_fingerprint, num_tokens=int(state.position.sum()),
            version=laconic.__version__, source=source,
        )  # fmt: skip

    def load(self, path: str | Path) -> FastWeightState:
        """What `save` wrote. Raises `Damaged` (76) for a file of other weights or another tokenizer, or no state."""
        state = self.model.load_state(path)
        theirs, ours = str(read_writer_metadata(path).get("tokenizer", "")), self.tokenizer.fingerprint
        if theirs and theirs != ours:
            raise CorruptArtifactError(
                f"state: {path} was read with tokenizer {theirs[:MAX_LISTED]}…, this is {ours[:MAX_LISTED]}…; take that one"
            )
        words = cast(torch.Tensor, self.model.token_embedding.weight)
        return cast(FastWeightState, values.to(state, words.device))


def read_writer_metadata(path: str | Path) -> Mapping[str, Any]:
    """What a state's file says of where it comes from."""
    return atomic.read_artifact_header(Path(path))[1].get("source") or {}


def read_documents(path: str | Path) -> list[list[ReadDocument]]:
    """What each row of a state's file has read, as far as it says."""
    return [[ReadDocument(**document) for document in row] for row in read_writer_metadata(path).get("documents", ())]


def run_to_end(job: StateReadingJob, groups: Iterable[Sequence[TokenStream]]) -> FastWeightState:
    """All of some texts read. Raises `Usage` (2) where none was given."""
    for _ in job.run(groups):
        pass
    if job.done is None:
        raise UsageError("no text is given; give one to read")
    return job.done


def is_nested(path: str | Path) -> bool:
    """Whether a folder holds a model that learns while it reads: a run of method hope, or a saved model."""
    folder = Path(path)
    if is_run_dir(folder):
        return load_recipe(folder / RECIPE_FILE)[0].method == NESTED_METHOD
    return (folder / "config.json").is_file() and build_nested.read_saved_config(folder) is not None


def load_text_model(path: str | Path, device: str = "cpu", step: int | None = None) -> TextCompressor | NestedTextModel:
    """A run that reads: of method hope a `Learned`, else a `Reader`. Raises as `load_learned` and `reader.load` do."""
    return (load_nested if is_nested(path) else reading.load_compressor)(path, device, step)


def load_nested(path: str | Path, device: str = "cpu", step: int | None = None) -> NestedTextModel:
    """The run of method hope at its newest good step, or the one asked for; or a folder of `save_pretrained`.

    Raises `BadInput` (66) for what is neither, `Damaged` (76), `Usage` (2) for a step of a folder.
    """
    place = weights.resolve_device(device)
    if is_run_dir(path):
        return as_nested(load_run(path, place, step))
    if step is not None:
        raise UsageError(f"step {step}: {path} is no run but a checkpoint, which has no steps; leave it out")
    folder = Path(path)
    shape = build_nested.read_saved_config(folder)
    assert shape is not None
    return NestedTextModel(
        build_nested.model_class(shape).from_pretrained(folder, device=place), load_tokenizer(folder)
    )


def as_nested(run: LoadedRun) -> NestedTextModel:
    """An opened run of method hope."""
    assert isinstance(run.parts.decoder, Hope)
    how = run.recipe.inner_loop
    return NestedTextModel(run.parts.decoder, run.parts.tokenizer, how is None or how.enabled)
