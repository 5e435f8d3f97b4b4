"""`laconic compress`: compress texts into summary vectors, or into a fast-weight state, and print what it cost."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from tyro.conf import Positional, arg

from laconic.cli.arguments import (
    Device,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OutputFormat,
    check_minimum,
    parse_dtype,
    refuse_flags,
)
from laconic.cli.files import (
    check_file,
    check_memories,
    check_model,
    check_replaceable,
    check_text_format,
    name_source,
    print_json,
)
from laconic.cli.model_flags import import_with_status
from laconic.compression.kv.config import DEFAULT_CONFIG, KVCompressionConfig
from laconic.console import log_message, pluralize, progress, status
from laconic.errors import BusyError, InputError, UsageError, translate_os_errors
from laconic.storage.temporary import is_device_or_pipe

if TYPE_CHECKING:
    from laconic.experiment.compress import CompressionJob
    from laconic.experiment.resumable_stream import TokenStream
    from laconic.experiment.text_models.compressor import TextCompressor
    from laconic.experiment.text_models.read_into_state import StateReadingJob

BLOCK_BYTES = 65_536  # bytes read at once
KV_FLAGS = ("method", "keep", "slots", "max_loss", "equal_heads", "chat", "fit")  # of plain models
LENGTH_FLAGS = ("stop_rule", "quantile", "threshold", "vectors", "total_vectors")  # how many summary vectors
SUMMARY_FLAGS = (*LENGTH_FLAGS, "segment_tokens")


@dataclass(frozen=True)
class CompressCommand:
    """Compress a text: into a part of its KV cache with a plain model, into summary vectors with an AutoCompressor, or
    into a fast-weight state with a Hope model or with --learn.

    Example: laconic compress smollm2 book.txt --out book.safetensors --keep 0.125

    Example: laconic compress smollm2 book.txt --out state.safetensors --learn
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """plain model (folder, hub name, .gguf), run of laconic train, or the folder of a published AutoCompressor or a
    saved Hope"""
    source: Annotated[Positional[str], arg(metavar="FILE")]
    """UTF-8 text of any length; - reads standard input; each line of a .jsonl is a separate text (field "text")"""
    out: Path
    """file to write"""
    method: Annotated[
        Literal["kvzip", "snapkv", "rkv", "h2o", "expected", "knorm", "window", "random"] | None,
        arg(metavar="{kvzip,snapkv,rkv,h2o,expected,knorm,window,random}", help_behavior_hint=""),
    ] = None
    """plain model: score that chooses the keys and values to keep (default: kvzip, which reads the text twice)"""
    keep: OptionalFloat = None
    """plain model: share of the keys and values to keep (default: 0.125, at least 64 tokens)"""
    slots: OptionalInt = None
    """plain model: number of tokens to keep per KV head, on average"""
    max_loss: OptionalFloat = None
    """plain model: keep as few as possible while the measured loss rises by at most this, in nats per token"""
    equal_heads: bool = False
    """plain model: kvzip keeps the same number of tokens in every KV head, which loses much more; needed
    to export what --fit makes as a cartridge for peft"""
    fit: OptionalInt = None
    """plain model: train the kept keys and values for this many steps to replace the whole text (a cartridge);
    about 4 s a step on one core for 135 M parameters, after the model has written texts about it for some minutes"""
    chat: bool = False
    """plain model: read the text as the beginning of a user message, for questions to a chat model"""
    learn: bool = False
    """plain model: let its MLPs learn the text instead, into a fast-weight state"""
    inner_lr: OptionalFloat = None
    """with --learn: learning rate of the MLPs (default: 0.1, from which on almost every step is clipped)"""
    memory: OptionalPath = None
    """fast-weight state to continue from; the new one has learned both texts. A state of several texts is continued
    with a .jsonl of as many rows, in the same order"""
    stop_rule: Annotated[
        Literal["quantile", "threshold", "sample"] | None,
        arg(metavar="{quantile,threshold,sample}", help_behavior_hint=""),
    ] = None
    """AutoCompressor: how the stop head chooses the number of vectors of a segment (default: as in the recipe)"""
    quantile: OptionalFloat = None
    """with --stop-rule quantile: stop at this cumulative probability"""
    threshold: OptionalFloat = None
    """with --stop-rule threshold: stop at the first stop probability this large"""
    vectors: OptionalInt = None
    """AutoCompressor: fixed number of vectors per segment, at most the recipe's max_vectors"""
    total_vectors: OptionalInt = None
    """AutoCompressor: number of vectors per text. The stop head chooses them at the end, so all vectors of every
    segment must fit the context first"""
    segment_tokens: OptionalInt = None
    """AutoCompressor: tokens per segment (default: as in training)"""
    batch_size: int = 8
    """rows of a .jsonl to process at once"""
    save_every: OptionalInt = None
    """AutoCompressor, Hope, --learn: number of segments after which progress is saved to OUT.part, for --resume"""
    resume: bool = False
    """continue from OUT.part; the result equals that of an uninterrupted command"""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        arg(metavar="{float32,bfloat16,float16}", help_behavior_hint=""),
    ] = None
    """dtype of the numbers in the file (default: the model's)"""
    seed: int = 0
    """random seed of --stop-rule sample, --method random and --fit"""
    device: Device = "auto"
    format: OutputFormat = "human"

    def run(self) -> int:
        self.validate()
        import_with_status(f"loading {self.model}")
        from laconic.experiment.load_run import is_nested

        if is_nested(self.model) or self.learn or self.memory is not None:
            from laconic.cli.nested import compress_text

            return compress_text(self)
        if keeps_kv(self.model):
            from laconic.cli.compress_kv import compress_with_checkpoint

            return compress_with_checkpoint(self)
        import laconic
        from laconic.experiment.compress import CompressionJob, SummaryLength
        from laconic.experiment.from_recipe.cost import describe_cost

        refuse_flags(self, KV_FLAGS, f"{self.model} writes summary vectors")
        length = SummaryLength(
            stop_rule=self.stop_rule,
            quantile=self.quantile,
            threshold=self.threshold,
            num_vectors=self.vectors,
            total_vectors=self.total_vectors,
            seed=self.seed,
        )
        with status(f"loading {self.model}"):
            model = laconic.load(self.model, device=self.device)
        compressor = model.compressor if isinstance(model, laconic.Reasoner) else model
        assert isinstance(compressor, laconic.TextCompressor)
        job = CompressionJob(compressor.method, length)
        if job.stop_rule.name != "sample":
            refuse_flags(self, ("seed",), "only with --stop-rule sample")
        start = time.perf_counter()
        self.check_text_length(compressor, job)
        tokenize = partial(compressor.token_stream, segment_tokens=self.segment_tokens)
        self.run_job(job, tokenize, self.resume_key(compressor))
        memory = compressor.with_metadata(job)
        dtype = parse_dtype(self.dtype)
        memory = memory if dtype is None else memory.to(dtype=dtype)
        memory.save(self.out)
        self.remove_partial()
        decoder = compressor.decoder
        cost, lines = describe_cost(memory, decoder.config, decoder.dtype, job.positions_spent)
        self.print_result(lines, {"cost": cost}, time.perf_counter() - start, cost["num_tokens"])
        return 0

    def validate(self) -> None:
        check_minimum(1, batch_size=self.batch_size, save_every=self.save_every, fit=self.fit)
        self.build_kv_config()  # refuses numbers out of range
        if not self.learn and self.memory is None:
            refuse_flags(self, ("inner_lr",), "needs --learn")
        check_model(self.model)
        if self.source != "-":
            check_file(Path(self.source), "a text, a .jsonl, or - for standard input")
        check_memories([] if self.memory is None else [self.memory])
        check_replaceable("--out", self.out)
        if (self.save_every is not None or self.resume) and is_device_or_pipe(self.out):
            raise UsageError(f"--out {self.out} is not a regular file; --save-every and --resume need one")
        if self.source != "-":
            check_text_format(Path(self.source))
        if self.save_every is not None and not self.resume and self.partial_path.exists():
            raise BusyError(
                f"{self.partial_path} holds what an interrupted command has read; --resume continues it, or delete it"
            )

    def build_kv_config(self) -> KVCompressionConfig:
        method = self.method or DEFAULT_CONFIG.method
        options = (self.keep, self.slots, self.max_loss)
        return KVCompressionConfig(method, *options, equal_heads=self.equal_heads, seed=self.seed)

    @property
    def partial_path(self) -> Path:
        return self.out.with_name(f"{self.out.name}.part")

    def remove_partial(self) -> None:
        """Delete OUT.part if it is of this command; without --save-every and --resume it is another file."""
        if self.save_every is not None or self.resume:
            self.partial_path.unlink(missing_ok=True)

    def resume_key(self, compressor: "TextCompressor") -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in (*LENGTH_FLAGS, "seed")},
            "segment_tokens": self.segment_tokens or compressor.segment_tokens,
            "batch_size": self.batch_size if self.is_jsonl else None,
            "weights": compressor.writer_fingerprint,
            "tokenizer": compressor.tokenizer.fingerprint,
        }

    def check_text_length(self, compressor: "TextCompressor", job: "CompressionJob") -> None:
        """Raise `UsageError` (2) if a segment, or a text of a file, is longer than the model can hold."""
        segment_tokens = self.segment_tokens or compressor.segment_tokens
        method = compressor.method
        if self.source == "-" or Path(self.source).is_fifo():
            return  # which can be read only once
        if segment_tokens > method.max_segment_tokens:
            context = compressor.decoder.config.max_position_embeddings
            raise UsageError(
                f"segments of {segment_tokens:,} tokens exceed the context of {context:,}, with the memory before a "
                f"segment and the vectors after it; give --segment-tokens {method.max_segment_tokens:,} or fewer"
            )
        max_segments = method.max_segments(segment_tokens, job.stop_rule.num_vectors)
        if max_segments is None:
            return
        tokenize = partial(compressor.token_stream, segment_tokens=self.segment_tokens)
        with status("checking the length"), self.open_source() as file:
            for text in starmap(tokenize, self.iter_texts(file)):
                num_segments = 0
                while text.next_segment():
                    num_segments += 1
                if num_segments > max_segments:
                    raise UsageError(
                        f"{text.name} has {pluralize(num_segments, 'segment')} of {segment_tokens} tokens; the memory "
                        f"holds at most {max_segments:,}; compress a part of the text, give fewer --vectors, or use a "
                        "run whose memory_policy is budgeted, fifo or replace"
                    )

    def run_job(
        self,
        job: "CompressionJob | StateReadingJob",
        tokenize: "Callable[[str, Iterable[str]], TokenStream]",
        key: dict[str, Any],
    ) -> None:
        """Run a job over all texts, showing progress and saving it every `save_every` steps.

        A disk that is too full for the rows so far ends it, with the first segment if a state does not fit.
        """
        from laconic.storage.atomic import check_space_for_file

        if self.resume:
            if not self.partial_path.is_file():
                raise InputError(f"--resume: no file {self.partial_path}; --save-every N writes one")
            job.load(self.partial_path, key)
        resumed = job.tokens
        saved = 0
        start = time.monotonic()
        total = 0 if self.source == "-" else Path(self.source).stat().st_size
        try:
            with self.open_source() as file, progress("reading") as show:
                if total and not self.resume:
                    show("bytes", 0, total)
                texts = starmap(tokenize, self.iter_texts(file))
                text = None if self.is_jsonl else next(texts)
                groups = iter(lambda: list(islice(texts, self.batch_size)), []) if text is None else [[text]]
                for step, _ in enumerate(job.run(groups), 1):
                    if self.resume and step == 1:  # the text is the one that was read
                        log_message(f"resuming after {resumed:,} tokens")
                    rate = (job.tokens - resumed) / max(time.monotonic() - start, 1e-9)
                    note = ", ".join(filter(None, (f"{job.tokens:,} tokens", f"{rate:,.0f} tokens/s", job.note)))
                    # rows in progress count as read
                    num_bytes = 1 if not total else file.tell() if text is None else min(text.bytes, total)
                    show(f"{note}, bytes", num_bytes or 1, total)
                    check_space_for_file(self.out, job.count_bytes(parse_dtype(self.dtype)))
                    if self.save_every is not None and step % self.save_every == 0:
                        job.save(self.partial_path, key)
                        saved = job.tokens
        except KeyboardInterrupt:
            if saved:
                log_message(f"{saved:,} tokens are in {self.partial_path}; the same command with --resume continues")
            raise

    @property
    def is_jsonl(self) -> bool:
        return self.source.endswith(".jsonl")

    def open_source(self) -> AbstractContextManager[BinaryIO]:
        if self.source == "-":
            return nullcontext(sys.stdin.buffer)
        with translate_os_errors(Path(self.source)):
            return Path(self.source).open("rb")

    def iter_texts(self, file: BinaryIO) -> Iterator[tuple[str, Iterable[str]]]:
        """Yield the name and the pieces of each text. Raises `InputError` (66) for bad rows."""
        from laconic.data.documents.load import iter_texts
        from laconic.data.documents.tokenize import decode_utf8

        source = name_source(Path(self.source))
        with translate_os_errors(Path(source)):
            if self.is_jsonl:
                for name, text in iter_texts(file, source):
                    yield name, [text]
            else:
                yield source, decode_utf8(iter(lambda: file.read(BLOCK_BYTES), b""), source)

    def print_result(self, lines: list[str], data: dict[str, Any], seconds: float, num_tokens: int = 0) -> None:
        """Print what was spent and what is saved, as lines or as JSON; `num_tokens` of this command give its rate."""
        num_bytes = self.out.stat().st_size
        if self.format == "json":
            metadata = {"schema": 1, "model": self.model, "source": self.source, "out": str(self.out)}
            metadata |= {"bytes": num_bytes, "seconds": round(seconds, 3)}
            print_json(metadata | data)
            return
        print("\n".join(lines))
        rate = f", {num_tokens / max(seconds, 1e-9):,.0f} tokens/s" if num_tokens else ""
        log_message(f"wrote {self.out}, {num_bytes:,} bytes, {seconds:.1f} s{rate}")


def is_plain_model(name: str) -> bool:
    """Return whether a model is neither a run nor a published AutoCompressor."""
    from laconic.experiment.load_autocompressor import is_compressor
    from laconic.experiment.load_run import find_run

    return find_run(name) is None and not is_compressor(name)


def keeps_kv(name: str) -> bool:
    """Return whether a model's memories are keys and values: a checkpoint, or a run that writes no summary vectors."""
    from laconic.experiment.load_autocompressor import is_compressor
    from laconic.experiment.load_run import read_run_recipe

    recipe = read_run_recipe(name)
    return not is_compressor(name) and (recipe is None or not recipe.reads_documents)
