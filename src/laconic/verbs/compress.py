"""`laconic compress`: texts read once into a file of vectors, or of fast weights, and the bill."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from laconic.console import note, progress, say
from laconic.core.errors import BadInput, Usage, on_disk
from laconic.verbs.arguments import torch_dtype, utf8

if TYPE_CHECKING:
    from laconic.core.memory import Memory
    from laconic.recipe.compressing import Compression
    from laconic.recipe.going import Text
    from laconic.recipe.reader import Reader
    from laconic.recipe.studying import Study

BLOCK = 65_536  # bytes read at once


class Seen:
    """How much of a source was read, for progress: bytes of `total`, which is 0 of a stream."""

    def __init__(self, work: "Compression | Study") -> None:
        self.work, self.total, self.began, self.before = work, 0, time.monotonic(), work.tokens
        self.heard = 0
        self.whole: Text | None = None

    def counted(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """The lines, their bytes counted on their way."""
        for line in lines:
            self.heard += len(line)
            yield line

    @property
    def done(self) -> int:
        """Bytes whose vectors are there; of lines, those of the rows under way too."""
        return min(self.heard if self.whole is None else self.whole.bytes, self.total)

    def rate(self) -> str:
        """Tokens so far, and how many in a second of this command."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        return f"{self.work.tokens:,} tokens, {(self.work.tokens - self.before) / seconds:,.0f} tokens/s"


@dataclass(frozen=True)
class Compress:
    """Reads a text once and writes what a run keeps of it, as a file of vectors that stand for it in prompts; of a
    model that learns while it reads, as the state of its fast weights.

    Example: laconic compress runs/books book.txt --out book.safetensors
    """

    model: Annotated[Positional[str], arg(metavar="RUN")]
    """a run of laconic train whose method is autocompressor or hope; or the folder of a published AutoCompressor, or
    of a saved Hope"""
    source: Annotated[Positional[str], arg(metavar="FILE")]
    """a text in UTF-8, of any length; - reads standard input; of a .jsonl each line's "text" is a row of its own"""
    out: Path
    """the file to write"""
    stop: Literal["quantile", "threshold", "sample"] | None = None
    """where a segment's vectors end, of a run that has learned it; by default as its recipe says"""
    q: float | None = None
    """quantile: end where so much of the probability lies behind"""
    tau: float | None = None
    """threshold: end at the first stop probability this large"""
    n: int | None = None
    """so many vectors of each segment"""
    budget: int | None = None
    """so many vectors of a text, shared out over its segments by the run's stop head"""
    segment: int | None = None
    """tokens of a segment; by default as the run was trained"""
    batch: int = 8
    """rows of a .jsonl read side by side"""
    every: int | None = None
    """keep what is done beside the file each so many segments, so that --resume can go on from there"""
    resume: bool = False
    """go on with what --every has kept; the result is that of an uninterrupted command"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """type of the vectors in the file; by default the model's"""
    seed: int = 0
    """of the draws of --stop sample"""
    device: str = "cpu"
    """cpu, cuda, cuda:1, …"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """Reads, compresses, writes; the bill on standard output."""
        self.check()
        from laconic.recipe.learned import learns

        if learns(utf8(self.model)):
            from laconic.verbs.states import compressed

            return compressed(self)
        from laconic.recipe.bill import bill
        from laconic.recipe.compressing import Compression, lengths
        from laconic.recipe.reader import load

        with note(f"loading {self.model}"):
            reader = load(utf8(self.model), self.device)
        how = lengths(
            reader.method, stop=self.stop, q=self.q, tau=self.tau, n=self.n, budget=self.budget, seed=self.seed
        )
        work, began = Compression(reader.method, how), time.perf_counter()
        if self.resume:
            self.go_on(work, self.key(reader))
        self.work(reader, work)
        memory = reader.known(work)
        dtype = torch_dtype(self.dtype)
        memory = memory if dtype is None else memory.to(dtype=dtype)
        memory.save(self.out)
        self.part.unlink(missing_ok=True)
        width = reader.decoder.words.weight.element_size()
        self.tell(memory, bill(memory, reader.decoder.config, width, work.spent), time.perf_counter() - began)
        return 0

    def check(self) -> None:
        """Raises `Usage` (2) for what cannot be meant, before anything is loaded."""
        if self.batch < 1 or (self.every is not None and self.every < 1):
            raise Usage(f"--batch {self.batch} --every {self.every}: give 1 or more")
        if self.source != "-" and not Path(utf8(self.source)).is_file():
            raise BadInput(f"no file {utf8(self.source)}; give a text, a .jsonl, or - for standard input")
        if not self.out.resolve().parent.is_dir():
            raise Usage(f"--out {self.out}: there is no folder {self.out.parent}; make it first")

    @property
    def part(self) -> Path:
        """What is kept before the file is whole."""
        return self.out.with_name(f"{self.out.name}.part")

    def key(self, reader: "Reader") -> dict[str, Any]:
        """All that the result depends on besides the text."""
        asked = {name: getattr(self, name) for name in ("stop", "q", "tau", "n", "budget", "seed")}
        rows = {"segment": self.segment or reader.segment, "batch": self.batch if self.rows else None}
        return {**asked, **rows, "weights": reader.writes, "tokenizer": reader.tokenizer.fingerprint}

    def go_on(self, work: "Compression", key: dict[str, Any]) -> None:
        """What was kept becomes where this command begins. Raises `BadInput` (66) where nothing is."""
        if not self.part.is_file():
            raise BadInput(f"--resume: no {self.part}; --every N keeps one while it reads")
        work.load(self.part, key)
        say(f"going on after {work.tokens:,} tokens")

    def work(self, reader: "Reader", work: "Compression") -> None:
        """All texts compressed, with progress, and kept now and then."""
        key, seen = self.key(reader), Seen(work)
        text = partial(reader.text, segment=self.segment)
        with progress("reading") as show:
            for done, _ in enumerate(work.run(self.groups(text, seen)), 1):
                show(seen.rate(), seen.done or 1, seen.total)
                if done == 1:
                    warn(reader, seen, self.segment or reader.segment)
                if self.every is not None and done % self.every == 0:
                    work.save(self.part, key)

    @property
    def rows(self) -> bool:
        """Whether the lines of the source are texts of their own."""
        return self.source.endswith(".jsonl")

    def groups(self, text: "Callable[[str, Iterable[str]], Text]", seen: "Seen") -> "Iterator[Sequence[Text]]":
        """The texts, each made by `text` of its name and parts, in groups that are read side by side."""
        from laconic.data.streaming import characters
        from laconic.data.texts import texts_of_lines

        path = None if self.source == "-" else Path(utf8(self.source))
        name = "standard input" if path is None else path.name
        with on_disk(Path(name)), nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as file:
            seen.total = 0 if path is None else path.stat().st_size
            if not self.rows:
                blocks = iter(lambda: file.read(BLOCK), b"")
                seen.whole = text(name, characters(blocks, name))
                yield [seen.whole]
                return
            group: list[Text] = []
            for called, line in texts_of_lines(seen.counted(file), name):
                group.append(text(called, [line]))
                if len(group) == self.batch:
                    yield group
                    group = []
            if group:
                yield group

    def tell(self, memory: "Memory", found: Any, seconds: float) -> None:
        """The bill."""
        if self.format == "json":
            about = {"schema": 1, "model": self.model, "source": self.source, "out": str(self.out)}
            bytes_ = self.out.stat().st_size
            print(json.dumps(about | {"bytes": bytes_, "seconds": round(seconds, 3), "bill": found.plain()}))
            return
        print("\n".join(found.lines()))
        rate = f"{found.tokens / seconds:,.0f} tokens/s"
        say(f"wrote {self.out}, {self.out.stat().st_size:,} bytes, {seconds:.1f} s, {rate}")


def warn(reader: "Reader", seen: Seen, segment: int) -> None:
    """Says, after the first segment, that a text is likely longer than a memory that accumulates can become."""
    most = reader.method.most(segment)
    if most is None or seen.whole is None or not seen.done:
        return
    likely = seen.total * len(seen.whole.segments) // seen.done
    if likely > most:
        say(
            f"the text has about {likely:,} segments; a memory of {reader.method.reading.fixed} vectors of each ends "
            f"after {most:,} of {segment} tokens. A part of the text, fewer vectors (--n), or a run whose memory is "
            "budgeted, fifo or replace goes further"
        )
