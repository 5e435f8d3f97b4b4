"""JSONL in and out for `laconic generate`: rows in order, written as they end, resumed after an interruption."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from laconic.cli.generate_output import GenerationTimer, find_done_file, generation_to_json, write_text
from laconic.console import log_message, progress
from laconic.errors import BusyError, CorruptArtifactError, UsageError, translate_os_errors
from laconic.experiment.text_models.prompts import PreparedPrompts
from laconic.generation.config import GenerationConfig
from laconic.storage.atomic import write_file_atomically, write_text_atomically
from laconic.storage.manifest import hash_file, hash_json, hash_line
from laconic.storage.run_dir import truncate_partial_line

if TYPE_CHECKING:
    from laconic.cli.commands.generate import GenerateCommand

KEY_FLAGS = ("quantize", "logprobs", "allow_long_prompt", "with_cot", "jacobi_tolerance", "learn", "inner_lr")


def generate_rows(
    command: "GenerateCommand", prompts: PreparedPrompts, config: GenerationConfig, timer: GenerationTimer
) -> None:
    """Generate for all rows, and write each as JSON, with its fields and a field `generation`.

    Row i samples with seed + i. Rows go to standard output, or with --output to a `PartialOutput`.
    """
    config = replace(config, return_state=False, on_prefill=timer.on_prefill)
    num_rows = len(prompts.prompts)
    part = None
    if command.output is not None:
        part = PartialOutput(command.output, build_key(command, prompts, config))
        if part.is_complete:
            log_message(f"{command.output} is complete: this command wrote its {part.num_rows:,} rows")
            return
        if part.num_rows:
            log_message(f"{part.path}: {part.num_rows:,} of {num_rows:,} rows are done; continuing")
    done = 0 if part is None else part.num_rows
    try:
        with progress("generating,") as show:
            for generations in prompts.generate_in_batches(config, command.batch_size, done):
                timer.add(generations, config.max_tokens)
                for generation in generations:
                    result = {"generation": generation_to_json(generation, command.logprobs)}
                    line = json.dumps(prompts.prompts[done].source | result, ensure_ascii=False)
                    if part is None:
                        write_text(f"{line}\n")
                    else:
                        part.append(line)
                    done += 1
                    show("rows", done, num_rows)
    except KeyboardInterrupt:
        if part is not None:
            log_message(f"{part.path}: {done:,} of {num_rows:,} rows are done; the same command continues")
        raise
    if part is not None:
        part.finish()
        log_message(f"wrote {part.output}, {num_rows:,} rows")
    if timer.rows:
        log_message(timer.describe())


def build_key(command: "GenerateCommand", prompts: PreparedPrompts, config: GenerationConfig) -> str:
    options = {name: value for name, value in asdict(config).items() if not name.startswith("on_")}
    flags = [getattr(command, name) for name in KEY_FLAGS]
    weights = [prompts.fingerprint, str(prompts.model.decoder.config.dtype), *hash_memory_files(command.memory)]
    sources = [prompt.source for prompt in prompts.prompts]
    return hash_json([weights, options, flags, sources, list(map(list, prompts.ids))])


def hash_memory_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file of the memories; a peft cartridge is a folder with files."""
    files = [file for path in paths for file in (sorted(path.glob("adapter_*")) if path.is_dir() else [path])]
    return [hash_file(file)[1] for file in files]


class PartialOutput:
    """OUTPUT.part: a line with the key of the command, then the rows that are done, each after a hash of all so far.

    When all are done, OUTPUT has the rows alone, and OUTPUT.done the last hash, which covers the key and all of them.

    Raises CorruptArtifactError if a row was changed; UsageError if it was begun with another key; BusyError if OUTPUT
    is not of this command.
    """

    def __init__(self, output: Path, key: str) -> None:
        self.output = output
        self.path = output.with_name(f"{output.name}.part")
        self.num_rows = 0
        self.digest = key
        self.is_complete = output.exists()
        if self.is_complete:
            self.check_complete()
            return
        with translate_os_errors(self.path):
            if not self.path.exists():
                write_text_atomically(self.path, f"{key}\n")
                return
            with self.path.open(encoding="utf-8", errors="replace") as file:
                self.read(file)
            truncate_partial_line(self.path)

    def check_complete(self) -> None:
        """Count the rows of OUTPUT, and delete what an interruption at the very end left of OUTPUT.part."""
        with translate_os_errors(self.output), self.output.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                self.add(line.removesuffix("\n"))
        done = find_done_file(self.output)
        if not done.is_file() or done.read_text(encoding="utf-8", errors="replace") != f"{self.digest}\n":
            raise BusyError(
                f"--output {self.output} exists, with other rows, flags or weights; delete it or choose another file"
            )
        self.path.unlink(missing_ok=True)

    def read(self, file: TextIO) -> None:
        """Check the key and the rows of an open file; count the rows, without a partial one at the end."""
        if file.readline() != f"{self.digest}\n":
            raise UsageError(
                f"{self.path} was begun with other rows, flags or weights, or by another version of laconic; "
                "repeat that command or delete the file"
            )
        for number, line in enumerate(takewhile(lambda line: line.endswith("\n"), file), 2):
            digest, _, row = line.rstrip("\n").partition(" ")
            self.add(row)
            if digest != self.digest:
                raise CorruptArtifactError(f"{self.path}:{number}: was changed after it was written; delete the file")

    def add(self, row: str) -> None:
        self.num_rows += 1
        self.digest = hash_line(self.digest, row)

    def append(self, row: str) -> None:
        self.add(row)
        with translate_os_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self.digest} {row}\n")

    def finish(self) -> None:
        """Write OUTPUT.done and OUTPUT, and delete OUTPUT.part; raise `BusyError` if OUTPUT was made meanwhile."""
        if self.output.exists():
            raise BusyError(
                f"{self.output} exists by now; the rows are in {self.path}: delete {self.output} and repeat the command"
            )

        def copy(new: Path) -> None:
            with self.path.open("rb") as source, new.open("wb") as target:
                source.readline()
                for line in source:
                    target.write(line.partition(b" ")[2])

        write_text_atomically(find_done_file(self.output), f"{self.digest}\n")
        write_file_atomically(self.output, copy, self.path.stat().st_size)
        os.unlink(self.path)
