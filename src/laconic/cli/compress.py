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

from laconic.cli.arguments import parse_dtype, to_utf8
from laconic.console import log_message, progress, status
from laconic.errors import InputError, UsageError, translate_os_errors

if TYPE_CHECKING:
    from laconic.compression.memory import SummaryMemory
    from laconic.experiment.compress import CompressionJob
    from laconic.experiment.compressor import TextCompressor
    from laconic.experiment.read_into_state import StateReadingJob
    from laconic.experiment.resumable_stream import TokenStream

BLOCK_BYTES = 65_536  # bytes read at once


class SourceProgress:
    """How much of a source was read, for progress: bytes of `total`, which is 0 of a stream."""

    def __init__(self, job: "CompressionJob | StateReadingJob") -> None:
        self.job, self.total, self.start_time, self.tokens_before = job, 0, time.monotonic(), job.tokens
        self.bytes_read = 0
        self.single_text: TokenStream | None = None

    def count_bytes(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """The lines, their bytes counted on their way."""
        for line in lines:
            self.bytes_read += len(line)
            yield line

    @property
    def bytes_done(self) -> int:
        """Bytes whose vectors are there; of lines, those of the rows under way too."""
        return min(self.bytes_read if self.single_text is None else self.single_text.bytes, self.total)

    def describe_rate(self) -> str:
        """Tokens so far, and how many in a second of this command."""
        seconds = max(time.monotonic() - self.start_time, 1e-9)
        return f"{self.job.tokens:,} tokens, {(self.job.tokens - self.tokens_before) / seconds:,.0f} tokens/s"


@dataclass(frozen=True)
class CompressCommand:
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
    stop_rule: Literal["quantile", "threshold", "sample"] | None = None
    """where a segment's vectors end, of a run that has learned it; by default as its recipe says"""
    quantile: float | None = None
    """quantile: end where so much of the probability lies behind"""
    threshold: float | None = None
    """threshold: end at the first stop probability this large"""
    vectors: int | None = None
    """so many vectors of each segment"""
    total_vectors: int | None = None
    """so many vectors of a text, shared out over its segments by the run's stop head"""
    segment_tokens: int | None = None
    """tokens of a segment; by default as the run was trained"""
    batch_size: int = 8
    """rows of a .jsonl read side by side"""
    save_every: int | None = None
    """keep what is done beside the file each so many segments, so that --resume can go on from there"""
    resume: bool = False
    """go on with what --save-every has kept; the result is that of an uninterrupted command"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """type of the vectors in the file; by default the model's"""
    seed: int = 0
    """of the draws of --stop-rule sample"""
    device: str = "cpu"
    """cpu, cuda, cuda:1, …"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """Reads, compresses, writes; the bill on standard output."""
        self.validate()
        from laconic.experiment.nested_model import is_nested

        if is_nested(to_utf8(self.model)):
            from laconic.cli.nested import compress_text

            return compress_text(self)
        from laconic.experiment.compress import CompressionJob, resolve_length_rule
        from laconic.experiment.compressor import load_compressor
        from laconic.experiment.cost import compute_cost

        with status(f"loading {self.model}"):
            reader = load_compressor(to_utf8(self.model), self.device)
        how = resolve_length_rule(
            reader.method,
            stop_rule=self.stop_rule,
            quantile=self.quantile,
            threshold=self.threshold,
            num_vectors=self.vectors,
            total_vectors=self.total_vectors,
            seed=self.seed,
        )
        work, began = CompressionJob(reader.method, how), time.perf_counter()
        if self.resume:
            self.resume_from_partial(work, self.resume_key(reader))
        self.compress_texts(reader, work)
        memory = reader.with_metadata(work)
        dtype = parse_dtype(self.dtype)
        memory = memory if dtype is None else memory.to(dtype=dtype)
        memory.save(self.out)
        self.partial_path.unlink(missing_ok=True)
        width = reader.decoder.token_embedding.weight.element_size()
        self.print_cost(
            memory,
            compute_cost(memory, reader.decoder.config, width, work.positions_spent),
            time.perf_counter() - began,
        )
        return 0

    def validate(self) -> None:
        """Raises `Usage` (2) for what cannot be meant, before anything is loaded."""
        if self.batch_size < 1 or (self.save_every is not None and self.save_every < 1):
            raise UsageError(f"--batch-size {self.batch_size} --save-every {self.save_every}: give 1 or more")
        if self.source != "-" and not Path(to_utf8(self.source)).is_file():
            raise InputError(f"no file {to_utf8(self.source)}; give a text, a .jsonl, or - for standard input")
        if not self.out.resolve().parent.is_dir():
            raise UsageError(f"--out {self.out}: there is no folder {self.out.parent}; make it first")

    @property
    def partial_path(self) -> Path:
        """What is kept before the file is whole."""
        return self.out.with_name(f"{self.out.name}.part")

    def resume_key(self, reader: "TextCompressor") -> dict[str, Any]:
        """All that the result depends on besides the text."""
        names = ("stop_rule", "quantile", "threshold", "vectors", "total_vectors", "seed")
        asked = {name: getattr(self, name) for name in names}
        rows = {
            "segment": self.segment_tokens or reader.segment_tokens,
            "batch": self.batch_size if self.is_jsonl else None,
        }
        return {**asked, **rows, "weights": reader.writer_fingerprint, "tokenizer": reader.tokenizer.fingerprint}

    def resume_from_partial(self, job: "CompressionJob", key: dict[str, Any]) -> None:
        """What was kept becomes where this command begins. Raises `BadInput` (66) where nothing is."""
        if not self.partial_path.is_file():
            raise InputError(f"--resume: no {self.partial_path}; --save-every N keeps one while it reads")
        job.load(self.partial_path, key)
        log_message(f"going on after {job.tokens:,} tokens")

    def compress_texts(self, reader: "TextCompressor", job: "CompressionJob") -> None:
        """All texts compressed, with progress, and kept now and then."""
        key, seen = self.resume_key(reader), SourceProgress(job)
        text = partial(reader.token_stream, segment_tokens=self.segment_tokens)
        with progress("reading") as show:
            for done, _ in enumerate(job.run(self.text_batches(text, seen)), 1):
                show(seen.describe_rate(), seen.bytes_done or 1, seen.total)
                if done == 1:
                    warn_if_too_long(reader, seen, self.segment_tokens or reader.segment_tokens)
                if self.save_every is not None and done % self.save_every == 0:
                    job.save(self.partial_path, key)

    @property
    def is_jsonl(self) -> bool:
        """Whether the lines of the source are texts of their own."""
        return self.source.endswith(".jsonl")

    def text_batches(
        self, text: "Callable[[str, Iterable[str]], TokenStream]", source_progress: "SourceProgress"
    ) -> "Iterator[Sequence[TokenStream]]":
        """The texts, each made by `text` of its name and parts, in groups that are read side by side."""
        from laconic.data.documents.load import iter_texts
        from laconic.data.documents.tokenize import decode_utf8

        path = None if self.source == "-" else Path(to_utf8(self.source))
        name = "standard input" if path is None else path.name
        with (
            translate_os_errors(Path(name)),
            nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as file,
        ):
            source_progress.total = 0 if path is None else path.stat().st_size
            if not self.is_jsonl:
                blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
                source_progress.single_text = text(name, decode_utf8(blocks, name))
                yield [source_progress.single_text]
                return
            group: list[TokenStream] = []
            for called, line in iter_texts(source_progress.count_bytes(file), name):
                group.append(text(called, [line]))
                if len(group) == self.batch_size:
                    yield group
                    group = []
            if group:
                yield group

    def print_cost(self, memory: "SummaryMemory", found: Any, seconds: float) -> None:
        """The bill."""
        if self.format == "json":
            about = {"schema": 1, "model": self.model, "source": self.source, "out": str(self.out)}
            bytes_ = self.out.stat().st_size
            print(json.dumps(about | {"bytes": bytes_, "seconds": round(seconds, 3), "bill": found.to_json()}))
            return
        print("\n".join(found.to_lines()))
        rate = f"{found.num_tokens / seconds:,.0f} tokens/s"
        log_message(f"wrote {self.out}, {self.out.stat().st_size:,} bytes, {seconds:.1f} s, {rate}")


def warn_if_too_long(reader: "TextCompressor", source_progress: SourceProgress, segment: int) -> None:
    """Says, after the first segment, that a text is likely longer than a memory that accumulates can become."""
    most = reader.method.max_segments(segment)
    if most is None or source_progress.single_text is None or not source_progress.bytes_done:
        return
    likely = source_progress.total * len(source_progress.single_text.segments) // source_progress.bytes_done
    if likely > most:
        log_message(
            f"the text has about {likely:,} segments; a memory of {reader.method.config.fixed_length} vectors of each ends "
            f"after {most:,} of {segment} tokens. A part of the text, fewer vectors (--vectors), or a run whose memory is "
            "budgeted, fifo or replace goes further"
        )
