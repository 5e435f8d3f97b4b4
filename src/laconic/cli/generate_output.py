"""Output of `laconic generate`: texts as they are generated, progress, timing, and JSON."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.console import ProgressFn, log_message, pluralize, progress

if TYPE_CHECKING:
    from laconic.experiment.text_models.prompts import GeneratedText
    from laconic.generation.config import GenerationConfig

MIN_PROGRESS_PROMPT = 256  # positions of a prompt from which reading it shows progress, or its loss


class GenerationTimer:
    """Measure prefill and decoding, or passes of runs that also think, and show the progress of prefill."""

    def __init__(self, *, shows_progress: bool = True, counts_passes: bool = False) -> None:
        self.shows_progress, self.counts_passes = shows_progress, counts_passes
        self.start = self.phase_start = time.perf_counter()
        self.prefill_seconds = self.decode_seconds = 0.0
        self.first_token_seconds: float | None = None
        self.prompt_tokens = self.new_tokens = self.passes = self.rows = self.num_full = self.num_empty = 0
        self.stack = ExitStack()
        self.show: ProgressFn | None = None

    def on_prefill(self, done: int, total: int, note: str = "tokens") -> None:
        """Follow the prompt; open a progress bar for a long one, and close it before the first token."""
        now = time.perf_counter()
        if done == 0:
            self.phase_start = now
            if self.shows_progress and total >= MIN_PROGRESS_PROMPT:
                self.show = self.stack.enter_context(progress("reading the prompt,"))
        if self.show is not None:
            self.show(note, done, total)
        if done == total:
            self.close_progress()
            self.prefill_seconds += now - self.phase_start
            self.phase_start = now

    def on_reading(self, done: int, total: int, nats: float) -> None:
        """Follow a prompt that is learned; report its loss if it is long."""
        self.on_prefill(done, total, f"tokens, {nats:.2f} nats per token" if done else "tokens")
        if done == total >= MIN_PROGRESS_PROMPT:
            log_message(f"learned from {total:,} tokens, {nats:.3f} nats per token")

    def close_progress(self) -> None:
        self.stack.close()
        self.show = None

    def on_token(self) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self.start

    def add(self, generations: "Sequence[GeneratedText]", max_tokens: int) -> None:
        """Count the tokens of a batch, and the texts that are empty or ended before `max_tokens` in a full context."""
        self.decode_seconds += time.perf_counter() - self.phase_start
        self.passes += sum(g.passes.total for g in generations)
        self.num_full += sum(g.stop_reason == "length" and len(g.token_ids) < max_tokens for g in generations)
        self.num_empty += sum(g.stop_reason == "eos" and not g.text for g in generations)
        self.prompt_tokens += sum(g.num_prompt_tokens for g in generations)
        self.new_tokens += sum(len(g.token_ids) for g in generations)
        self.rows += len(generations)

    @property
    def decode_rate(self) -> float:
        """New tokens per second after the first of each row, which comes from prefill."""
        return (self.new_tokens - self.rows) / max(self.decode_seconds, 1e-9)

    def describe(self) -> str:
        import torch

        if self.counts_passes:
            seconds = time.perf_counter() - self.start
            return f"{self.new_tokens:,} tokens in {self.passes:,} passes, {seconds:.2f} s"
        digits = 0 if self.decode_rate >= 10 else 1
        rate = f" ({self.decode_rate:,.{digits}f} tokens/s)" if self.new_tokens > self.rows else ""
        return (
            f"{pluralize(self.prompt_tokens, 'token')} read in {self.prefill_seconds:.1f} s, "
            f"{self.new_tokens:,} generated in {self.decode_seconds:.1f} s{rate}, "
            f"{pluralize(torch.get_num_threads(), 'thread')}"
        )

    def to_json(self) -> dict[str, Any]:
        import torch

        seconds = {"seconds": round(time.perf_counter() - self.start, 3)}
        if self.counts_passes:
            return seconds
        rates = (self.prompt_tokens / max(self.prefill_seconds, 1e-9), self.decode_rate)
        prefill = {"tokens": self.prompt_tokens, "seconds": self.prefill_seconds, "tokens_per_second": rates[0]}
        decode = {"tokens": self.new_tokens, "tokens_after_first": self.new_tokens - self.rows}
        decode |= {"seconds": self.decode_seconds, "tokens_per_second": rates[1]}
        return seconds | {
            "seconds_to_first_token": round(self.first_token_seconds or 0.0, 4),
            "prefill": {name: round(value, 4) for name, value in prefill.items()},
            "decode": {name: round(value, 4) for name, value in decode.items()},
            "threads": torch.get_num_threads(),
        }


class GenerationPrinter:
    """Print a single text as it is generated, and several, with progress until then, in row order as they finish."""

    def __init__(self, labels: Sequence[str], timer: GenerationTimer, *, is_silent: bool = False) -> None:
        self.labels, self.timer, self.is_silent = labels, timer, is_silent
        self.is_streaming = len(labels) == 1 and not is_silent
        self.finished: dict[int, str] = {}
        self.num_printed = self.num_tokens = self.max_tokens = 0
        self.show: ProgressFn | None = None

    def attach(self, config: "GenerationConfig") -> "GenerationConfig":
        """Return the options with callbacks that print and measure."""
        self.max_tokens = config.max_tokens * len(self.labels)
        on_finish = None if self.is_silent or self.is_streaming else self.print_finished
        return replace(config, on_prefill=self.timer.on_prefill, on_token=self.print_token, on_finish=on_finish)

    def print_token(self, row: int, token: int, text: str, logprob: float) -> None:
        self.timer.on_token()
        if self.is_streaming:
            write_text((self.labels[0] if self.num_tokens == 0 else "") + text)
        else:
            self.show = self.show or self.timer.stack.enter_context(progress("generating,"))
            self.show("tokens", self.num_tokens, self.max_tokens)
        self.num_tokens += 1

    def print_finished(self, row: int, generation: "GeneratedText") -> None:
        self.finished[row] = generation.text
        self.timer.close_progress()  # it must not be on the terminal while a text is printed
        self.show = None
        while self.num_printed in self.finished:
            separator = "\n" if self.num_printed else ""
            write_text(f"{separator}{self.labels[self.num_printed]}{self.finished[self.num_printed]}\n")
            self.num_printed += 1

    def finish(self, generations: "Sequence[GeneratedText]", max_tokens: int) -> None:
        """Print the end of a text that was streamed, or the texts for which no callback was called."""
        self.timer.close_progress()
        self.timer.add(generations, max_tokens)
        if self.is_streaming and self.num_tokens:
            write_text("\n")
        elif not self.is_silent:
            for row in range(self.num_printed, len(generations)):
                self.print_finished(row, generations[row])


def find_done_file(output: Path) -> Path:
    """Return the file that a complete output has beside it; see `PartialOutput`."""
    return output.with_name(f"{output.name}.done")


def write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def generation_to_json(generation: "GeneratedText", should_add_logprobs: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "text": generation.text,
        "ids": generation.token_ids,
        "stop_reason": generation.stop_reason,
        "prompt_tokens": generation.num_prompt_tokens,
        "passes": generation.passes._asdict() | {"total": generation.passes.total},
    }
    if not should_add_logprobs:
        return row
    logprobs = generation.logprobs  # None for a method of one's own that does not return them
    return row | {"logprobs": None if logprobs is None else [round(x, 6) for x in logprobs]}
