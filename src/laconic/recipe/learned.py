"""A model that learns while it reads, with its tokenizer: texts become a state, on which prompts are answered."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

import laconic
from laconic.core import artifact, state_file, weights
from laconic.core import state as values
from laconic.core.errors import Damaged, Usage
from laconic.core.generate import Generation, OnToken, generate
from laconic.core.state import State
from laconic.data.tokens import Tokenizer, load_tokenizer
from laconic.methods.hope_model import KIND, Hope
from laconic.recipe import learners
from laconic.recipe import reader as reading
from laconic.recipe.going import Text
from laconic.recipe.opened import RECIPE, Opened, is_run, opened
from laconic.recipe.read import read
from laconic.recipe.reader import Reader, now
from laconic.recipe.studying import Document, Study, with_room

METHOD = "hope"
PIECE = 512  # tokens of a text read at once; what is learned does not depend on it
SHORT = 12  # characters of a hash that a message shows


@dataclass(frozen=True)
class Learned:
    """A Hope with its tokenizer. `learn` False: it was trained with fast weights that stand still, and reads so."""

    model: Hope
    tokenizer: Tokenizer
    learn: bool = True

    @property
    def attends(self) -> bool:
        """Whether it has attention, and sees a text without learning of it."""
        return self.model.shape.memory is None

    @cached_property
    def window(self) -> int:
        """Tokens that attention sees at most."""
        return self.model.config.max_position_embeddings

    def compress(self, texts: Sequence[str], state: State | None = None, *, names: Sequence[str] = ()) -> State:
        """What is learned of each text, a row each, all read side by side; on `state` of one row if it is given.

        Raises `Usage` (2), `BadInput` (66) for an empty text, `NonFinite` (65).
        """
        called = [*names] or [f"text {i}" for i in range(1, len(texts) + 1)]
        if isinstance(texts, str) or not texts or len(called) != len(texts):
            raise Usage("texts: give a list of at least one text, and as many names as texts or none")
        study = self.study(state)
        return studied(study, [[self.text(name, [text]) for name, text in zip(called, texts, strict=True)]])

    def stream(self, parts: Iterable[str], state: State | None = None) -> State:
        """One row for a text that comes in parts, of any length."""
        return studied(self.study(state), [[self.text("stream", parts)]])

    def study(self, before: State | None = None) -> Study:
        """Texts to be read. Raises `Usage` (2) for a model that has learned to stand still, and for other rows."""
        if not self.learn:
            raise Usage("learning.learn is false in this run: its fast weights stand still; give a run that learns")
        if before is not None and len(before.position) != 1:
            raise Usage(f"a state of {len(before.position)} rows before a text; take the row that it goes on from")
        return Study(self.model, self.window, before)

    def text(self, name: str, parts: Iterable[str]) -> Text:
        """A text, read in pieces."""
        return Text(name, parts, self.tokenizer, min(PIECE, self.window) if self.attends else PIECE)

    def generate(
        self,
        prompts: Sequence[str],
        state: State | None = None,
        *,
        learn: bool = False,
        max_tokens: int,
        min_tokens: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        on_token: OnToken | None = None,
    ) -> list[Generation]:
        """Prompts continued on a state of as many rows, or of one for all; one prompt goes to all rows.

        `learn` lets the prompt teach; a model without attention learns of prompt and answer in any case, since it would
        not see them. The state that is given is never changed: what comes of it is in every `Generation.state`.
        Raises `Usage` (2) for other numbers of rows, and as `laconic.generate` does.
        """
        ids = [self.tokenizer.encode(text) for text in prompts]
        if state is not None:
            rows = len(state.position)
            if len(ids) != rows and 1 not in (rows, len(ids)):
                raise Usage(f"{len(ids)} prompts on a state of {rows} rows; give one prompt, or as many as rows")
            ids = ids * rows if len(ids) == 1 else ids
            state = values.take(state, [0] * len(ids)) if rows == 1 else state
            state = with_room(self.model, state, max(map(len, ids)) + max_tokens, self.window)
        teaches = False if not self.learn else True if learn else None
        return generate(
            self.model,
            self.tokenizer,
            ids=ids,
            state=state,
            learn=teaches,
            learn_answer=None if self.learn else False,
            eos=self.ends,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop,
            seed=seed,
            on_token=on_token,
        )

    @property
    def ends(self) -> tuple[int, ...]:
        """What a text ends with: the tokenizer's eos, and others where the model's own files name it beside them."""
        ends, eos = self.model.config.eos, self.tokenizer.eos
        return ends if eos is None or eos in ends else (eos,)

    def save(self, state: State, path: str | Path, documents: Sequence[Sequence[Document]] = ()) -> None:
        """A state as one file that these weights open, with this tokenizer. Raises `NonFinite` (65), `NoSpace` (74).

        `documents` are what each row has read.
        """
        rows = [[document._asdict() for document in row] for row in documents]
        source = {"tokenizer": self.tokenizer.fingerprint, "created": now(), "documents": rows,
                  "chunks": self.model.shape.chunks}  # fmt: skip
        state_file.save(
            values.detach(state), path, kind=KIND, model=self.model.slow, tokens=int(state.position.sum()),
            version=laconic.__version__, source=source,
        )  # fmt: skip

    def load(self, path: str | Path) -> State:
        """What `save` wrote. Raises `Damaged` (76) for a file of other weights or another tokenizer, or no state."""
        state = self.model.load_state(path)
        theirs, ours = str(source_of(path).get("tokenizer", "")), self.tokenizer.fingerprint
        if theirs and theirs != ours:
            raise Damaged(
                f"state: {path} was read with tokenizer {theirs[:SHORT]}…, this is {ours[:SHORT]}…; take that one"
            )
        words = cast(torch.Tensor, self.model.words.weight)
        return cast(State, values.to(state, words.device))


def source_of(path: str | Path) -> Mapping[str, Any]:
    """What a state's file says of where it comes from."""
    return artifact.described(Path(path))[1].get("source") or {}


def documents_of(path: str | Path) -> list[list[Document]]:
    """What each row of a state's file has read, as far as it says."""
    return [[Document(**document) for document in row] for row in source_of(path).get("documents", ())]


def studied(study: Study, groups: Iterable[Sequence[Text]]) -> State:
    """All of some texts read. Raises `Usage` (2) where none was given."""
    for _ in study.run(groups):
        pass
    if study.kept is None:
        raise Usage("no text is given; give one to read")
    return study.kept


def learns(path: str | Path) -> bool:
    """Whether a folder holds a model that learns while it reads: a run of method hope, or a saved model."""
    folder = Path(path)
    if is_run(folder):
        return read(folder / RECIPE)[0].method == METHOD
    return (folder / "config.json").is_file() and learners.made_before(folder) is not None


def load(path: str | Path, device: str = "cpu", step: int | None = None) -> Reader | Learned:
    """A run that reads: of method hope a `Learned`, else a `Reader`. Raises as `load_learned` and `reader.load` do."""
    return (load_learned if learns(path) else reading.load)(path, device, step)


def load_learned(path: str | Path, device: str = "cpu", step: int | None = None) -> Learned:
    """The run of method hope at its newest good step, or the one asked for; or a folder of `save_pretrained`.

    Raises `BadInput` (66) for what is neither, `Damaged` (76), `Usage` (2) for a step of a folder.
    """
    place = weights.place_of(device)
    if is_run(path):
        return learned_of(opened(path, place, step))
    if step is not None:
        raise Usage(f"step {step}: {path} is no run but a checkpoint, which has no steps; leave it out")
    folder = Path(path)
    shape = learners.made_before(folder)
    assert shape is not None
    return Learned(learners.kind(shape).from_pretrained(folder, device=place), load_tokenizer(folder))


def learned_of(run: Opened) -> Learned:
    """An opened run of method hope."""
    assert isinstance(run.parts.decoder, Hope)
    how = run.recipe.learning
    return Learned(run.parts.decoder, run.parts.tokenizer, how is None or how.learn)
