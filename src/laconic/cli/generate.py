"""`laconic generate`: prompts continued, questions answered."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from laconic.cli.arguments import DtypeName, parse_dtype, to_utf8
from laconic.console import log_message, status
from laconic.errors import UsageError
from laconic.generation.config import GenerationConfig

if TYPE_CHECKING:
    from laconic import Decoder, Generation, SummaryMemory


@dataclass(frozen=True)
class GenerateCommand:
    """Continues one or more prompts, on memories if they are given; of a run, answers questions as its method does.

    Example: laconic generate stories260k "Once upon a time" --max-tokens 196
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """a checkpoint in Hugging Face layout: a folder, or a name on the hub; or a run of laconic train"""
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT")]
    """what to continue or to answer; several are read as one batch"""
    memory: UseAppendAction[tuple[Path, ...]] = ()
    """a file of laconic compress to stand before the prompts; several are joined, the first one the oldest; of a model
    that learns while it reads, the state of its fast weights, one file"""
    learn: bool = False
    """of a model that learns while it reads: let the prompts teach it, and keep what it has learned with --save-state"""
    save_state: Path | None = None
    """with --learn: the file to write the state to, as it is after prompt and answer"""
    max_tokens: int = 128
    """tokens to write at most"""
    min_tokens: int = 0
    """tokens to write at least, before an end is allowed"""
    temperature: float = 0.0
    """0 takes the most likely token; 1 draws as the model says"""
    top_k: int = 0
    """draw among the k most likely tokens; 0: all"""
    top_p: float = 1.0
    """draw among the fewest tokens that hold this share of the probability"""
    min_p: float = 0.0
    """draw among tokens at least this likely, relative to the likeliest"""
    repetition_penalty: float = 1.0
    """above 1, tokens already there become less likely"""
    stop_string: UseAppendAction[tuple[str, ...]] = ()
    """end before this text; may be given several times"""
    seed: int = 0
    """of the draws; the same seed gives the same text"""
    with_cot: bool = False
    """of a run: answer by a written chain, with the same weights"""
    chat: bool = False
    """put each prompt into the model's chat template, as a message of the user"""
    dtype: DtypeName | None = None
    """type to compute in; by default float32 on a CPU, the stored type on a GPU"""
    device: str = "cpu"
    """cpu, cuda, cuda:1, …"""
    revision: str | None = None
    """commit, tag or branch on the hub"""
    allow_missing: UseAppendAction[tuple[str, ...]] = ()
    """a tensor that may be absent from the checkpoint and is then drawn at random"""
    format: Literal["human", "json"] = "human"
    """json: one object, and nothing else, on standard output"""

    def run(self) -> int:
        """Loads, writes, reports; the text on standard output, the figures on standard error."""
        import laconic
        from laconic.experiment.load_run import is_run_dir

        prompts = [to_utf8(prompt) for prompt in self.prompts]
        if not prompts:
            raise UsageError("no prompt given; laconic generate MODEL PROMPT")
        from laconic.experiment.compressor import is_compressor
        from laconic.experiment.nested_model import is_nested

        if is_nested(self.model):
            from laconic.cli.nested import generate_text

            return generate_text(self, prompts)
        if given := "--learn" if self.learn else "--save-state" if self.save_state is not None else None:
            raise UsageError(f"{given}: {self.model} has no fast weights; give a run of method hope, or leave it out")
        if (read := is_compressor(self.model)) or is_run_dir(self.model):
            return self.generate_with_memory(prompts) if read or self.memory else self.answer_questions(prompts)
        if self.memory:
            raise UsageError(f"--memory: {self.model} is no run; give the one that wrote it")
        if self.with_cot:
            raise UsageError(f"--with-cot: {self.model} is no run; give the folder that laconic train wrote")
        with status(f"loading {self.model}"):
            decoder = laconic.Decoder.from_pretrained(
                self.model,
                dtype=parse_dtype(self.dtype),
                device=self.device,
                revision=self.revision,
                allow_missing=self.allow_missing,
            )
            tokenizer = laconic.load_tokenizer(decoder.source_folder or self.model)
        turns = [
            tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in prompts if self.chat
        ]
        start = time.perf_counter()
        chat_ids = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
        written = laconic.generate(
            decoder,
            tokenizer,
            None if self.chat else prompts,
            input_ids=chat_ids if self.chat else None,
            config=self.generation_config(self.make_streamer(prompts)),
        )
        self.print_generations(prompts, written, decoder, time.perf_counter() - start)
        return 0

    def generate_with_memory(self, prompts: list[str]) -> int:
        """Continuations by a run that reads, on the memories joined; one of several texts is asked about each."""
        from laconic.compression.memory import SummaryMemory
        from laconic.experiment.compressor import load_compressor

        self.refuse_checkpoint_flags({"chat": self.chat, "teacher": self.with_cot})
        with status(f"loading {self.model}"):
            reader = load_compressor(self.model, self.device)
            memory = (
                SummaryMemory.concat_segments(*(reader.load(path) for path in self.memory)) if self.memory else None
            )
        rows = 1 if memory is None else memory.B
        asked = (
            [f"{title}{prompt}" for title in memory_row_titles(memory) for prompt in prompts]
            if len(prompts) == 1
            else prompts
        )
        start = time.perf_counter()
        streamer = self.make_streamer(prompts) if rows == 1 else None
        written = reader.generate(prompts, memory, config=self.generation_config(streamer))
        self.print_generations(asked, written, reader.decoder, time.perf_counter() - start)
        return 0

    def generation_config(self, on_token: Callable[[int, int, str, float], None] | None = None) -> GenerationConfig:
        """Return the options of generation that the flags set."""
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

    def refuse_checkpoint_flags(self, others: dict[str, object]) -> None:
        """Raises `Usage` (2) for what the recipe of a run says, or what is not of a run."""
        odd = others | {"allow_missing": self.allow_missing, "dtype": self.dtype, "revision": self.revision}
        given = next((name for name, value in odd.items() if value), None)
        if given:
            raise UsageError(f"--{given.replace('_', '-')}: not of a run, whose recipe says it; leave it out")

    def answer_questions(self, prompts: list[str]) -> int:
        """Answers of a run: by its method, or by chain."""
        from laconic.experiment.load_run import load_run
        from laconic.experiment.methods import answer_decoding, answer_questions, build_questions_batch
        from laconic.models.weights import resolve_device

        self.refuse_checkpoint_flags({"chat": self.chat, "stop": self.stop_string, "min_tokens": self.min_tokens})
        with status(f"loading {self.model}"):
            run = load_run(self.model, resolve_device(self.device))
        how = self.generation_config()
        told = answer_decoding(run.parts, run.recipe, self.max_tokens, how, self.seed)
        start = time.perf_counter()
        found = answer_questions(
            run.method,
            build_questions_batch(run.parts, run.recipe, prompts).to(self.device),
            told,
            with_cot=self.with_cot,
        )
        seconds = time.perf_counter() - start
        if self.format == "json":
            rows = [
                {"prompt": prompt, "text": text, "ids": ids, "passes": passes._asdict() | {"total": passes.total}}
                for prompt, text, ids, passes in zip(prompts, found.texts, found.token_ids, found.passes, strict=True)
            ]
            about = {"schema": 1, "model": self.model, "step": run.step, "method": run.recipe.method}
            print(json.dumps(about | {"seconds": round(seconds, 3), "generations": rows}, ensure_ascii=False))
            return 0
        print("\n".join(found.texts))
        passes = sum(p.total for p in found.passes)
        log_message(f"{sum(map(len, found.token_ids))} tokens in {passes} passes, {seconds:.2f} s")
        return 0

    def make_streamer(self, prompts: list[str]) -> Callable[[int, int, str, float], None] | None:
        """Prints a single text while it is written; several, or JSON, are printed whole at the end."""
        if self.format == "json" or len(prompts) != 1:
            return None
        head = iter(prompts)

        def show(row: int, token: int, text: str, logprob: float) -> None:
            sys.stdout.write(next(head, "") + text)
            sys.stdout.flush()

        return show

    def print_generations(
        self, prompts: list[str], written: "list[Generation]", decoder: "Decoder", seconds: float
    ) -> None:
        """What was written, and how many passes and seconds it took."""
        tokens = sum(len(g.token_ids) for g in written)
        if self.format == "json":
            rows = [
                {
                    "prompt": prompt,
                    "text": g.text,
                    "ids": g.token_ids,
                    "stop_reason": g.stop_reason,
                    "passes": g.passes._asdict() | {"total": g.passes.total},
                }
                for prompt, g in zip(prompts, written, strict=True)
            ]
            about = {"schema": 1, "model": self.model, "weights": decoder.fingerprint, "seconds": round(seconds, 3)}
            print(json.dumps(about | {"generations": rows}, ensure_ascii=False))
            return
        if len(prompts) == 1:
            print()
        else:
            print("\n\n".join(prompt + g.text for prompt, g in zip(prompts, written, strict=True)))
        passes = sum(g.passes.total for g in written)
        log_message(f"{tokens} tokens in {passes} passes, {seconds:.2f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s")


def memory_row_titles(memory: "SummaryMemory | None") -> list[str]:
    """What to call each row of a memory of several texts: the names of its documents; of a single one nothing."""
    if memory is None or memory.B == 1 or memory.metadata is None:
        return [""] * (1 if memory is None else memory.B)
    return [f"[{', '.join(each.name for each in row)}] " for row in memory.metadata.documents]
