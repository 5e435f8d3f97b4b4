"""`laconic generate`: continue prompts, or answer questions with a trained run."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, UseAppendAction, arg

from laconic.cli.arguments import (
    OptionalDtype,
    OptionalPath,
    OptionalStr,
    OutputFormat,
    parse_dtype,
    refuse_flags,
    to_utf8,
)
from laconic.console import log_message, status
from laconic.errors import UsageError

if TYPE_CHECKING:
    from laconic import Decoder, Generation, GenerationConfig, SummaryMemory

TokenCallback = Callable[[int, int, str, float], None]


@dataclass(frozen=True)
class GenerateCommand:
    """Generate text, optionally conditioned on memories; for a run, answer with its method.

    Example: laconic generate stories260k "Once upon a time" --max-tokens 196
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """checkpoint in Hugging Face layout (folder or hub name), or a run of laconic train"""
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT", help_behavior_hint="")]
    """prompts to continue or questions to answer; several are one batch"""
    memory: UseAppendAction[tuple[Path, ...]] = ()
    """file(s) written by laconic compress, prepended to the prompt in order; for a model with fast weights, one file
    with its state"""
    learn: bool = False
    """for models with fast weights: let prompt and answer update them; see --save-state"""
    save_state: OptionalPath = None
    """with --learn: file for the state after prompt and answer"""
    max_tokens: int = 128
    """largest number of new tokens"""
    min_tokens: int = 0
    """number of new tokens before which no end-of-sequence token is generated"""
    temperature: float = 0.0
    """0: take the most likely token; otherwise sample"""
    top_k: int = 0
    """sample from the k most likely tokens; 0: all"""
    top_p: float = 1.0
    """sample from the most likely tokens whose probabilities add up to this"""
    min_p: float = 0.0
    """sample from tokens at least this many times as likely as the most likely one"""
    repetition_penalty: float = 1.0
    """values above 1 make tokens that occurred before less likely"""
    stop_string: UseAppendAction[tuple[str, ...]] = ()
    """end the output before this text"""
    seed: int = 0
    """random seed for sampling"""
    with_cot: bool = False
    """for runs: generate the chain of thought before the answer"""
    chat: bool = False
    """wrap each prompt in the model's chat template, as a user message"""
    dtype: OptionalDtype = None
    """compute dtype (default: float32 on CPUs, the stored dtype on GPUs)"""
    device: str = "cpu"
    """cpu, cuda, cuda:1, …"""
    revision: OptionalStr = None
    """commit, tag or branch on the hub"""
    allow_missing: UseAppendAction[tuple[str, ...]] = ()
    """tensor that may be missing from the checkpoint; it is then initialised at random"""
    format: OutputFormat = "human"
    """json: print one JSON object to standard output"""

    def run(self) -> int:
        """Generate; the text goes to standard output, the statistics to standard error."""
        prompts = [to_utf8(prompt) for prompt in self.prompts]
        if not prompts:
            raise UsageError("no prompt given; laconic generate MODEL PROMPT")
        from laconic.experiment.compressor import is_compressor
        from laconic.experiment.load_run import is_run_dir
        from laconic.experiment.nested_model import is_nested

        if is_nested(self.model):
            from laconic.cli.nested import generate_text

            return generate_text(self, prompts)
        reason = f"{self.model} has no fast weights; use a run of method hope"
        refuse_flags({"learn": self.learn, "save_state": self.save_state}, reason)
        if is_compressor(self.model):
            return self.generate_with_memory(prompts)
        if is_run_dir(self.model):
            return self.generate_with_memory(prompts) if self.memory else self.answer_questions(prompts)
        refuse_flags({"memory": self.memory, "with_cot": self.with_cot}, f"{self.model} is not a run of laconic train")
        return self.generate_with_checkpoint(prompts)

    def generation_config(self, on_token: TokenCallback | None = None) -> "GenerationConfig":
        """Return the options of generation that the flags set."""
        from laconic.generation.config import GenerationConfig

        return GenerationConfig(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop_strings=self.stop_string,
            seed=self.seed,
            on_token=on_token,
        )

    def generate_with_checkpoint(self, prompts: list[str]) -> int:
        """Continue prompts with a checkpoint in Hugging Face layout."""
        import laconic

        with status(f"loading {self.model}"):
            decoder = laconic.Decoder.from_pretrained(
                self.model,
                dtype=parse_dtype(self.dtype),
                device=self.device,
                revision=self.revision,
                allow_missing=self.allow_missing,
            )
            tokenizer = laconic.load_tokenizer(decoder.source_folder or self.model)
        chat_ids = None
        if self.chat:
            turns = [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts]
            chat_ids = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
        start = time.perf_counter()
        generations = laconic.generate(
            decoder,
            tokenizer,
            None if self.chat else prompts,
            input_ids=chat_ids,
            config=self.generation_config(self.make_streamer(prompts)),
        )
        self.print_generations(prompts, generations, decoder, time.perf_counter() - start)
        return 0

    def generate_with_memory(self, prompts: list[str]) -> int:
        """Continue prompts on the concatenated memories; a single prompt is repeated for each text of a memory."""
        from laconic.compression.memory import SummaryMemory
        from laconic.experiment.compressor import load_compressor

        self.refuse_checkpoint_flags({"chat": self.chat, "with_cot": self.with_cot})
        with status(f"loading {self.model}"):
            compressor = load_compressor(self.model, self.device)
            memories = [compressor.load(path) for path in self.memory]
            memory = SummaryMemory.concat_segments(*memories) if memories else None
        rows = 1 if memory is None else memory.B
        titled = prompts
        if len(prompts) == 1:
            titled = [f"{title}{prompts[0]}" for title in memory_row_titles(memory)]
        start = time.perf_counter()
        config = self.generation_config(self.make_streamer(prompts) if rows == 1 else None)
        generations = compressor.generate(prompts, memory, config=config)
        self.print_generations(titled, generations, compressor.decoder, time.perf_counter() - start)
        return 0

    def refuse_checkpoint_flags(self, flags: dict[str, object]) -> None:
        """Raise `UsageError` (2) if `flags`, or flags that a run's recipe fixes, are set."""
        fixed = {"allow_missing": self.allow_missing, "dtype": self.dtype, "revision": self.revision}
        refuse_flags(flags | fixed, "not available for a run; its recipe fixes it")

    def answer_questions(self, prompts: list[str]) -> int:
        """Answer questions with a run's method, or with its chain of thought."""
        from laconic.experiment.load_run import load_run
        from laconic.experiment.methods import answer_decoding, answer_questions, build_questions_batch
        from laconic.models.weights import resolve_device

        flags = {"chat": self.chat, "stop_string": self.stop_string, "min_tokens": self.min_tokens}
        self.refuse_checkpoint_flags(flags)
        with status(f"loading {self.model}"):
            run = load_run(self.model, resolve_device(self.device))
        decoding = answer_decoding(run.parts, run.recipe, self.max_tokens, self.generation_config(), self.seed)
        start = time.perf_counter()
        batch = build_questions_batch(run.parts, run.recipe, prompts).to(self.device)
        answers = answer_questions(run.method, batch, decoding, with_cot=self.with_cot)
        seconds = time.perf_counter() - start
        if self.format == "json":
            rows = [
                {"prompt": prompt, "text": text, "ids": ids, "passes": passes._asdict() | {"total": passes.total}}
                for prompt, text, ids, passes in zip(
                    prompts, answers.texts, answers.token_ids, answers.passes, strict=True
                )
            ]
            metadata = {"schema": 1, "model": self.model, "step": run.step, "method": run.recipe.method}
            print(json.dumps(metadata | {"seconds": round(seconds, 3), "generations": rows}, ensure_ascii=False))
            return 0
        print("\n".join(answers.texts))
        passes = sum(p.total for p in answers.passes)
        log_message(f"{sum(map(len, answers.token_ids))} tokens in {passes} passes, {seconds:.2f} s")
        return 0

    def make_streamer(self, prompts: list[str]) -> TokenCallback | None:
        """Return a callback that prints a single text as it is generated; several texts and JSON are printed later."""
        if self.format == "json" or len(prompts) != 1:
            return None
        pending = iter(prompts)

        def print_token(row: int, token: int, text: str, logprob: float) -> None:
            sys.stdout.write(next(pending, "") + text)
            sys.stdout.flush()

        return print_token

    def print_generations(
        self, prompts: list[str], generations: "Sequence[Generation]", decoder: "Decoder", seconds: float
    ) -> None:
        """Print the generated texts that are not streamed, and the number of passes and seconds."""
        if self.format == "json":
            rows = [
                {
                    "prompt": prompt,
                    "text": g.text,
                    "ids": g.token_ids,
                    "stop_reason": g.stop_reason,
                    "passes": g.passes._asdict() | {"total": g.passes.total},
                }
                for prompt, g in zip(prompts, generations, strict=True)
            ]
            metadata = {"schema": 1, "model": self.model, "weights": decoder.fingerprint, "seconds": round(seconds, 3)}
            print(json.dumps(metadata | {"generations": rows}, ensure_ascii=False))
            return
        if len(prompts) == 1:
            print()
        else:
            print("\n\n".join(prompt + g.text for prompt, g in zip(prompts, generations, strict=True)))
        passes, tokens = sum(g.passes.total for g in generations), sum(len(g.token_ids) for g in generations)
        log_message(f"{tokens} tokens in {passes} passes, {seconds:.2f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s")


def memory_row_titles(memory: "SummaryMemory | None") -> list[str]:
    """Return a prefix for each row of a memory of several texts: the names of its documents; "" for a single text."""
    if memory is None or memory.B == 1 or memory.metadata is None:
        return [""] * (1 if memory is None else memory.B)
    return [f"[{', '.join(document.name for document in row)}] " for row in memory.metadata.documents]
