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
from laconic.core import weights
from laconic.core.cache import Cache
from laconic.core.decoder import Decoder
from laconic.core.errors import Usage
from laconic.core.generate import Generation, OnToken, generate
from laconic.core.memory import Memory
from laconic.core.prompt import pad_left
from laconic.core.provenance import Provenance
from laconic.data.tokens import Tokenizer
from laconic.methods.autocompressor import AutoCompressor
from laconic.methods.segments import positions_of, prompt
from laconic.methods.stopping import Stop
from laconic.recipe.compressing import Compression, lengths
from laconic.recipe.going import Text
from laconic.recipe.opened import RECIPE, Opened, is_run, opened
from laconic.recipe.published import is_published, published
from laconic.recipe.read import read


class Asked(NamedTuple):
    """Prompts on a memory: their ids, the cache of what stands before them, and where each begins."""

    ids: list[list[int]]
    state: Cache | None
    start: Int[Tensor, " B"] | None


@dataclass(frozen=True)
class Reader:
    """An AutoCompressor with its tokenizer; `segment` is the length in tokens in which it was taught to read.

    `reads` and `writes` are fingerprints of the weights that do; the two differ where an adapter only writes.
    """

    method: AutoCompressor
    tokenizer: Tokenizer
    segment: int
    reads: str
    writes: str

    @property
    def decoder(self) -> Decoder:
        """What reads vectors."""
        return self.method.decoder

    @cached_property
    def provenance(self) -> Provenance:
        """What a memory that is written now comes from, its texts aside."""
        reading, halting, config = self.method.reading, self.method.halting, self.decoder.config
        settings = {
            "reading": reading.model_dump(mode="json"),
            "halting": None if halting is None else halting.model_dump(mode="json"),
        }
        return Provenance(
            laconic=laconic.__version__,
            reader=self.reads,
            writer=self.writes,
            family=config.family,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            vocab=config.vocab_size,
            method=settings,
            positions=positions_of(reading, config),
            bos=reading.bos if reading.bos is not None and self.method.unit.bos is not None else "none",
            recurrent=reading.recurrent,
            dtype=str(self.decoder.words.weight.dtype).removeprefix("torch."),
            tokenizer=self.tokenizer.fingerprint,
            created=now(),
        )

    def compress(
        self,
        texts: Sequence[str],
        *,
        names: Sequence[str] = (),
        segment: int | None = None,
        stop: Stop | None = None,
        q: float | None = None,
        tau: float | None = None,
        n: int | None = None,
        budget: int | None = None,
        seed: int = 0,
    ) -> Memory:
        """A row of memory for each text, all read side by side.

        `stop` with `q` or `tau`, `n` of each segment, or a `budget` for a text say how many vectors there are; by
        default the run does. Raises `Usage` (2), and `BadInput` (66) for an empty text.
        """
        how = lengths(self.method, stop=stop, q=q, tau=tau, n=n, budget=budget, seed=seed)
        called = [*names] or [f"text {i}" for i in range(1, len(texts) + 1)]
        if isinstance(texts, str) or not texts or len(called) != len(texts):
            raise Usage("texts: give a list of at least one text, and as many names as texts or none")
        group = [self.text(name, [text], segment) for name, text in zip(called, texts, strict=True)]
        return self.compressed(Compression(self.method, how), [group])

    def stream(self, parts: Iterable[str], *, name: str = "stream", segment: int | None = None) -> Memory:
        """One row of memory for a text that comes in parts, of any length, lengths as the run has them."""
        return self.compressed(Compression(self.method, lengths(self.method)), [[self.text(name, parts, segment)]])

    def text(self, name: str, parts: Iterable[str], segment: int | None = None) -> Text:
        """A text to be read in segments of the run's own length or another. Raises `Usage` (2) for less than one."""
        if segment is not None and segment < 1:
            raise Usage(f"segment {segment}: give 1 token or more")
        return Text(name, parts, self.tokenizer, segment or self.segment)

    def compressed(self, work: Compression, groups: Iterable[Sequence[Text]]) -> Memory:
        """All of some work done."""
        for _ in work.run(groups):
            pass
        return self.known(work)

    def known(self, work: Compression) -> Memory:
        """What was made, with where it comes from. Raises `Usage` (2) where no text was given."""
        if work.kept is None:
            raise Usage("no text is given; give one to compress")
        return replace(work.kept, provenance=replace(self.provenance, documents=tuple(work.documents)))

    def load(self, path: str | Path) -> Memory:
        """A memory that this run may read, in the decoder's type and place. Raises `Damaged` (76), `BadInput` (66)."""
        first = self.decoder.words.weight
        return Memory.load(path, self.provenance).to(first.device, first.dtype)

    def asked(self, prompts: Sequence[str], memory: Memory) -> Asked:
        """Prompts on a memory of as many rows, of one for all, or one prompt for all rows; a memory is read once.

        Raises `Usage` (2) for other numbers, and for a memory and a prompt that do not fit the model.
        """
        if memory.provenance is not None:
            memory.provenance.check("the one given", self.provenance)
        given, B = [self.tokenizer.encode(text, special=False) for text in prompts], memory.B
        if len(given) != B and 1 not in (B, len(given)):
            raise Usage(f"{len(given)} prompts on a memory of {B} texts; give one prompt, or as many as texts")
        ids = given * B if len(given) == 1 else given
        if not all(ids):
            raise Usage(f"prompt {ids.index([])} is empty; give text")
        self.method.unit.check(memory, max(map(len, ids)))
        _, live = pad_left(ids)
        with torch.no_grad(), self.reading():
            state = self.prefilled(memory)
        state = state if state is None or len(ids) == B else state.fork(len(ids))
        many = memory if len(ids) == B else memory.take([0] * len(ids))
        unit = self.method.unit
        placed = prompt(self.decoder, unit.reading, many, unit.bos, live.to(many.live.device)).positions
        return Asked(ids, state, None if placed is None else placed[:, -1] + 1 - live.sum(1).to(placed.device))

    def prefilled(self, memory: Memory) -> Cache | None:
        """The cache of a memory, and of what stands before it; None of nothing."""
        before = self.method.prompt(memory)
        if not before.vectors.shape[1]:
            return None
        return self.decoder(before.vectors, live=before.live, positions=before.positions).state

    def reading(self) -> AbstractContextManager[object]:
        """The decoder as it reads; an adapter that only writes is off."""
        return self.method.unit.reader()

    @property
    def ends(self) -> tuple[int, ...]:
        """What a text ends with: the tokenizer's eos, and others where the model's own files name it beside them."""
        ends, eos = self.decoder.config.eos, self.tokenizer.eos
        return ends if eos is None or eos in ends else (eos,)

    def generate(
        self,
        prompts: Sequence[str],
        memory: Memory | None = None,
        *,
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
        """Prompts continued on a memory, as `laconic.generate` does without: see there, and `asked` for the rows."""
        found = Asked([self.tokenizer.encode(text) for text in prompts], None, None)
        found = found if memory is None else self.asked(prompts, memory)
        with self.reading():
            return generate(
                self.decoder,
                self.tokenizer,
                ids=found.ids,
                state=found.state,
                start=found.start,
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


def load(path: str | Path, device: str = "cpu", step: int | None = None) -> Reader:
    """The run of an AutoCompressor at its newest good step, or the one asked for; or the folder of a published one.

    Raises `BadInput` (66) for what is neither, `Usage` (2) for a run of another method, `Damaged` (76), and `Unsafe`
    (77) for pickles.
    """
    place = weights.place_of(device)
    if is_run(path) or not is_published(path):
        return reader_of(opened(path, place, step))
    if step is not None:
        raise Usage(f"step {step}: {path} is no run but a checkpoint, which has no steps; leave it out")
    found = published(path, place)
    whole = found.method.decoder.fingerprint
    return Reader(found.method, found.tokenizer, found.segment, whole, writer(found.method))


def reads(path: str | Path) -> bool:
    """Whether a folder is one that reads texts into memories: a run by its recipe, or a published AutoCompressor."""
    return read(Path(path) / RECIPE)[0].method == "autocompressor" if is_run(path) else is_published(path)


def writer(method: AutoCompressor) -> str:
    """The fingerprint of all that writes a memory: the decoder, and what is learned beside it."""
    learned = weights.fingerprint(method.summaries.state_dict().items())
    return sha256(f"{method.decoder.fingerprint} {learned}".encode()).hexdigest()


def reader_of(run: Opened) -> Reader:
    """An opened run as a reader. Raises `Usage` (2) for one whose method reads no texts."""
    method = run.method
    if not isinstance(method, AutoCompressor):
        raise Usage(
            f"{run.folder} was trained by {run.recipe.method}, which keeps no memory; give a run of autocompressor"
        )
    reads = run.parts.base if method.reading.adapt == "write" else method.decoder.fingerprint
    data = run.recipe.data
    segment = data.recall.length if data.kind == "recall" else data.text.mean
    return Reader(method, run.parts.tokenizer, segment, reads, writer(method))


def now() -> str:
    """The time, or what SOURCE_DATE_EPOCH says it is."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    when = datetime.datetime.now(datetime.UTC)
    when = datetime.datetime.fromtimestamp(int(given), datetime.UTC) if given.isdecimal() else when
    return when.isoformat(timespec="seconds")
