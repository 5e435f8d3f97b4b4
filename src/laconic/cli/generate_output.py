"""Output of `laconic generate`: texts as they are generated, progress, timing, and JSON."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from laconic.console import ProgressFn, pluralize, progress

if TYPE_CHECKING:
    from laconic.generation.config import GenerationConfig
    from laconic.generation.generate import Generation

MIN_PROGRESS_PROMPT = 256  # positions of a prompt from which reading it shows progress


class GenerationTimer:
    """Measure prefill and decoding of one or more `generate` calls, and show the progress of prefill."""

    def __init__(self, *, shows_progress: bool = True) -> None:
        self.shows_progress = shows_progress
        self.start = self.phase_start = time.perf_counter()
        self.prefill_seconds = self.decode_seconds = 0.0
        self.first_token_seconds: float | None = None
        self.prompt_tokens = self.new_tokens = self.rows = 0
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

    def close_progress(self) -> None:
        self.stack.close()
        self.show = None

    def on_token(self) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = time.perf_counter() - self.start

    def add(self, generations: "Sequence[Generation]") -> None:
        self.decode_seconds += time.perf_counter() - self.phase_start
        self.prompt_tokens += sum(g.num_prompt_tokens for g in generations)
        self.new_tokens += sum(len(g.token_ids) for g in generations)
        self.rows += len(generations)

    @property
    def decode_rate(self) -> float:
        """New tokens per second after the first of each row, which comes from prefill."""
        return (self.new_tokens - self.rows) / max(self.decode_seconds, 1e-9)

    def describe(self) -> str:
        import torch

        digits = 0 if self.decode_rate >= 10 else 1
        rate = f" ({self.decode_rate:,.{digits}f} tokens/s)" if self.new_tokens > self.rows else ""
        return (
            f"{pluralize(self.prompt_tokens, 'token')} read in {self.prefill_seconds:.1f} s, "
            f"{self.new_tokens:,} generated in {self.decode_seconds:.1f} s{rate}, "
            f"{pluralize(torch.get_num_threads(), 'thread')}"
        )

    def to_json(self) -> dict[str, Any]:
        import torch

        rates = (self.prompt_tokens / max(self.prefill_seconds, 1e-9), self.decode_rate)
        prefill = {"tokens": self.prompt_tokens, "seconds": self.prefill_seconds, "tokens_per_second": rates[0]}
        decode = {"tokens": self.new_tokens, "tokens_after_first": self.new_tokens - self.rows}
        decode |= {"seconds": self.decode_seconds, "tokens_per_second": rates[1]}
        return {
            "seconds": round(time.perf_counter() - self.start, 3),
            "seconds_to_first_token": round(self.first_token_seconds or 0.0, 4),
            "prefill": {name: round(value, 4) for name, value in prefill.items()},
            "decode": {name: round(value, 4) for name, value in decode.items()},
            "threads": torch.get_num_threads(),
        }


class GenerationPrinter:
    """Print a single text as it is generated, and several in row order as they finish, each after its row's label.

    Until then, and if the printer is silent, progress is shown.
    """

    def __init__(self, labels: Sequence[str], *, is_silent: bool = False) -> None:
        self.labels, self.is_silent, self.timer = labels, is_silent, GenerationTimer()
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

    def print_finished(self, row: int, generation: "Generation") -> None:
        """Print the rows that have ended, in order."""
        self.finished[row] = generation.text
        self.timer.close_progress()  # it must not be on the terminal while a text is printed
        self.show = None
        while self.num_printed in self.finished:
            separator = "\n" if self.num_printed else ""
            write_text(f"{separator}{self.labels[self.num_printed]}{self.finished[self.num_printed]}\n")
            self.num_printed += 1

    def finish(self, generations: "Sequence[Generation]") -> None:
        self.timer.close_progress()
        self.timer.add(generations)
        if self.is_streaming:
            write_text("\n")


def write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def generation_to_json(generation: "Generation", should_add_logprobs: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "text": generation.text,
        "ids": generation.token_ids,
        "stop_reason": generation.stop_reason,
        "prompt_tokens": generation.num_prompt_tokens,
        "passes": generation.passes._asdict() | {"total": generation.passes.total},
    }
    return row | ({"logprobs": [round(x, 6) for x in generation.logprobs]} if should_add_logprobs else {})
