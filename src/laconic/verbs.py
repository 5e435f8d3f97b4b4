"""The verbs of the command line: their flags, and what each prints and writes."""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from laconic.console import note, progress, say, write
from laconic.core.errors import BadInput, Usage

if TYPE_CHECKING:
    from laconic import Decoder, Generation

Dtype = Literal["float32", "float64", "bfloat16", "float16"]


def torch_dtype(name: Dtype | None) -> Any:
    """The torch type of a name."""
    import torch

    return None if name is None else getattr(torch, name)


def utf8(text: str) -> str:
    """An argument as UTF-8, whatever the locale took it for."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise Usage(f"{text!r} is not UTF-8") from None


@dataclass(frozen=True)
class Generate:
    """Continues one or more prompts.

    Example: laconic generate stories260k "Once upon a time" --max-tokens 196
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """a checkpoint in Hugging Face layout: a folder, or a name on the hub"""
    prompts: Annotated[Positional[tuple[str, ...]], arg(metavar="PROMPT")]
    """what to continue; several are read as one batch"""
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

        prompts = [utf8(prompt) for prompt in self.prompts]
        if not prompts:
            raise Usage("no prompt given; laconic generate MODEL PROMPT")
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


@dataclass(frozen=True)
class Export:
    """Writes a model in Hugging Face layout, which transformers, vLLM and SGLang load as it is.

    Example: laconic export stories260K.bin --out stories260k
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """a checkpoint (folder or hub name), or a llama2.c file (.bin)"""
    out: Path
    """the folder to write; it must not exist, or be empty"""
    adapter: Path | None = None
    """folder of an adapter in the layout of peft, to be merged into the weights"""
    dtype: Dtype | None = None
    """type of the numbers written; by default as stored"""
    shard_bytes: float = 5e9
    """bytes of one file at most"""

    def run(self) -> int:
        """Loads, merges, writes."""
        from laconic import recipe
        from laconic.core import weights
        from laconic.core.decoder import Decoder

        with note(f"loading {self.model}"):
            if self.model.endswith(".bin"):
                decoder = Decoder.from_llama2c(self.model)
            else:
                folder = weights.find(self.model)
                decoder = Decoder.from_pretrained(folder, torch_dtype(self.dtype) or weights.stored_dtype(folder))
            if self.adapter:
                decoder = recipe.merged(recipe.load_adapter(decoder, self.adapter))
        with note(f"writing {self.out}"):
            decoder.save_pretrained(self.out, dtype=torch_dtype(self.dtype), shard_bytes=self.shard_bytes)
        say(f"wrote {self.out}: {sum(p.numel() for p in decoder.parameters()):,} parameters")
        return 0


@dataclass(frozen=True)
class Parity:
    """Compares a model with a reference, stage by stage, in units of the noise of each stage.

    Example: laconic verify parity stories260k --out report.html
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """a checkpoint (folder or hub name), or tiny:FAMILY for the random fixture of a family"""
    reference: str | None = None
    """transformers; golden, the bundle shipped for these weights; or the folder of a bundle. By default transformers
    if it is installed, else golden. transformers reads the same config.json: only a bundle tells that it was changed"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """below float32, errors are judged by their ratio to the reference's own in that type"""
    inputs: str = "all"
    """which inputs to try: all, or a list such as I1,I7"""
    layers: str = "all"
    """which layers to look at: all, or a list such as 0,5,last"""
    out: Path | None = None
    """write one HTML page here"""
    json: Path | None = None
    """write the findings as JSON here"""
    write_golden: Path | None = None
    """write what transformers gave as a golden bundle into this folder"""

    def run(self) -> int:
        """0 if every comparison asked for ran and passed, else 1."""
        from rich.console import Console

        from laconic.verify.run import run

        for path in (self.out, self.json):
            if path and not path.absolute().parent.is_dir():
                raise BadInput(f"{path}: no folder {path.parent} to write into; make it first")
        with progress("comparing") as show:
            report = run(
                self.model,
                reference=self.reference,
                dtype=self.dtype,
                inputs=self.inputs,
                layers=self.layers,
                write_golden=self.write_golden,
                command=shlex.join(["laconic", *sys.argv[1:]]),
                on_case=show,
            )
        Console().print(report.table())
        print(report.sentence())
        if self.out:
            from laconic.verify.page import page

            write(self.out, page(report))
        if self.json:
            write(self.json, json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
        return 0 if report.ok else 1


@dataclass(frozen=True)
class Ledger:
    """Compares the papers' equations with the code and its tests.

    Example: laconic verify ledger
    """

    write: bool = False
    """write docs/ledger.md anew"""

    def run(self) -> int:
        """0 if every equation has its function, oracle and misreadings, else 1."""
        from rich.console import Console

        from laconic.verify import ledger

        if self.write:
            write(ledger.home() / "docs" / "ledger.md", ledger.render(ledger.home()))
        findings = ledger.check()
        Console().print(ledger.table(findings))
        return 1 if findings else 0


@dataclass(frozen=True)
class All:
    """Runs the ledger, and parity on the random fixture of each family.

    Example: laconic verify
    """

    def run(self) -> int:
        """0 if every check ran and passed, else 1."""
        from laconic.core.families import NAMES

        return max([Ledger().run(), *(Parity(f"tiny:{family}").run() for family in NAMES)])
