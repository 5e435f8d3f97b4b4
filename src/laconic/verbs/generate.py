"""`laconic generate`: prompts continued, questions answered."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from laconic.console import note, say
from laconic.core.errors import Usage
from laconic.verbs.arguments import Dtype, torch_dtype, utf8

if TYPE_CHECKING:
    from laconic import Decoder, Generation, Memory


@dataclass(frozen=True)
class Generate:
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
    """of a model that learns while it reads: let the prompts teach it, and keep what it has learned with --save"""
    save: Path | None = None
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
    stop: UseAppendAction[tuple[str, ...]] = ()
    """end before this text; may be given several times"""
    seed: int = 0
    """of the draws; the same seed gives the same text"""
    teacher: bool = False
    """of a run: answer by a written chain, with the same weights"""
    chat: bool = False
    """put each prompt into the model's chat template, as a message of the user"""
    dtype: Dtype | None = None
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
        from laconic.recipe.opened import is_run

        prompts = [utf8(prompt) for prompt in self.prompts]
        if not prompts:
            raise Usage("no prompt given; laconic generate MODEL PROMPT")
        from laconic.recipe.learned import learns
        from laconic.recipe.reader import reads

        if learns(self.model):
            from laconic.verbs.states import continued

            return continued(self, prompts)
        if given := "--learn" if self.learn else "--save" if self.save is not None else None:
            raise Usage(f"{given}: {self.model} has no fast weights; give a run of method hope, or leave it out")
        if (read := reads(self.model)) or is_run(self.model):
            return self.reading(prompts) if read or self.memory else self.answers(prompts)
        if self.memory:
            raise Usage(f"--memory: {self.model} is no run; give the one that wrote it")
        if self.teacher:
            raise Usage(f"--teacher: {self.model} is no run; give the folder that laconic train wrote")
        with note(f"loading {self.model}"):
            decoder = laconic.Decoder.from_pretrained(
                self.model,
                dtype=torch_dtype(self.dtype),
                device=self.device,
                revision=self.revision,
                allow_missing=self.allow_missing,
            )
            tokenizer = laconic.load_tokenizer(decoder.folder or self.model)
        turns = [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in prompts if self.chat]
        start = time.perf_counter()
        written = laconic.generate(
            decoder,
            tokenizer,
            None if self.chat else prompts,
            ids=[tokenizer.encode(turn, special=False) for turn in turns] if self.chat else None,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            seed=self.seed,
            on_token=self.streamer(prompts),
        )
        self.tell(prompts, written, decoder, time.perf_counter() - start)
        return 0

    def reading(self, prompts: list[str]) -> int:
        """Continuations by a run that reads, on the memories joined; one of several texts is asked about each."""
        from laconic.core.memory import Memory
        from laconic.recipe.reader import load

        self.check_run({"chat": self.chat, "teacher": self.teacher})
        with note(f"loading {self.model}"):
            reader = load(self.model, self.device)
            memory = Memory.join(*(reader.load(path) for path in self.memory)) if self.memory else None
        rows = 1 if memory is None else memory.B
        asked = [f"{title}{prompt}" for title in titles(memory) for prompt in prompts] if len(prompts) == 1 else prompts
        start = time.perf_counter()
        written = reader.generate(
            prompts,
            memory,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            seed=self.seed,
            on_token=self.streamer(prompts) if rows == 1 else None,
        )
        self.tell(asked, written, reader.decoder, time.perf_counter() - start)
        return 0

    def check_run(self, others: dict[str, object]) -> None:
        """Raises `Usage` (2) for what the recipe of a run says, or what is not of a run."""
        odd = others | {"allow_missing": self.allow_missing, "dtype": self.dtype, "revision": self.revision}
        given = next((name for name, value in odd.items() if value), None)
        if given:
            raise Usage(f"--{given.replace('_', '-')}: not of a run, whose recipe says it; leave it out")

    def answers(self, prompts: list[str]) -> int:
        """Answers of a run: by its method, or by chain."""
        from laconic.core.sampling import Sampling
        from laconic.core.weights import place_of
        from laconic.recipe.methods import answer, asked, writing
        from laconic.recipe.opened import opened

        self.check_run({"chat": self.chat, "stop": self.stop, "min_tokens": self.min_tokens})
        with note(f"loading {self.model}"):
            run = opened(self.model, place_of(self.device))
        how = Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)
        told = writing(run.parts, run.recipe, self.max_tokens, how, self.seed)
        start = time.perf_counter()
        found = answer(run.method, asked(run.parts, run.recipe, prompts).to(self.device), told, teacher=self.teacher)
        seconds = time.perf_counter() - start
        if self.format == "json":
            rows = [
                {"prompt": prompt, "text": text, "ids": ids, "passes": passes._asdict() | {"total": passes.total}}
                for prompt, text, ids, passes in zip(prompts, found.texts, found.ids, found.passes, strict=True)
            ]
            about = {"schema": 1, "model": self.model, "step": run.step, "method": run.recipe.method}
            print(json.dumps(about | {"seconds": round(seconds, 3), "generations": rows}, ensure_ascii=False))
            return 0
        print("\n".join(found.texts))
        passes = sum(p.total for p in found.passes)
        say(f"{sum(map(len, found.ids))} tokens in {passes} passes, {seconds:.2f} s")
        return 0

    def streamer(self, prompts: list[str]) -> Callable[[int, int, str, float], None] | None:
        """Prints a single text while it is written; several, or JSON, are printed whole at the end."""
        if self.format == "json" or len(prompts) != 1:
            return None
        head = iter(prompts)

        def show(row: int, token: int, text: str, logprob: float) -> None:
            sys.stdout.write(next(head, "") + text)
            sys.stdout.flush()

        return show

    def tell(self, prompts: list[str], written: "list[Generation]", decoder: "Decoder", seconds: float) -> None:
        """What was written, and how many passes and seconds it took."""
        tokens = sum(len(g.ids) for g in written)
        if self.format == "json":
            rows = [
                {
                    "prompt": prompt,
                    "text": g.text,
                    "ids": g.ids,
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
        say(f"{tokens} tokens in {passes} passes, {seconds:.2f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s")


def titles(memory: "Memory | None") -> list[str]:
    """What to call each row of a memory of several texts: the names of its documents; of a single one nothing."""
    if memory is None or memory.B == 1 or memory.provenance is None:
        return [""] * (1 if memory is None else memory.B)
    return [f"[{', '.join(each.name for each in row)}] " for row in memory.provenance.documents]
