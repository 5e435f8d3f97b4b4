"""JSONL in and out for `laconic generate`: rows in order, written as they end, resumed after an interruption."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from laconic.cli.generate_context import ContextLimit
from laconic.cli.generate_output import GenerationTimer, generation_to_json, write_text
from laconic.cli.generate_prompts import PromptRow, find_row_stop_ids
from laconic.compression.kv.memory import KVMemory
from laconic.console import log_message, progress
from laconic.data.tokenizer import Tokenizer
from laconic.errors import BusyError, CorruptArtifactError, UsageError, translate_os_errors
from laconic.experiment.text_models.kv_compressor import build_row_caches
from laconic.generation.config import GenerationConfig
from laconic.storage.atomic import write_file_atomically, write_text_atomically
from laconic.storage.manifest import hash_file, hash_json, hash_line
from laconic.storage.run_dir import truncate_partial_line

if TYPE_CHECKING:
    from laconic.cli.commands.generate import GenerateCommand


def generate_rows(
    command: "GenerateCommand",
    limit: ContextLimit,
    tokenizer: Tokenizer,
    rows: Sequence[PromptRow],
    ids: Sequence[list[int]],
    config: GenerationConfig,
    memory: KVMemory | None = None,
) -> None:
    """Generate for all rows and write them, as `write_rows` does. Row i samples with seed + i.

    `memory` has one text for all prompts, or one for each. The rows of a batch end with the same ids: where texts
    follow chat messages, a new batch begins.
    """
    timer, seed = GenerationTimer(shows_progress=False), config.seed
    assert isinstance(seed, int)
    stop_ids = [find_row_stop_ids(row, limit.decoder, tokenizer) for row in rows]

    def key() -> str:
        model = [limit.decoder.fingerprint, str(limit.decoder.config.dtype), command.quantize]
        flags = [list_options(config), command.logprobs, limit.may_exceed, *hash_memory_files(command.memory)]
        return hash_json([*model, *flags, [row.source for row in rows], ids])

    def results(first: int) -> Iterator[dict[str, Any]]:
        stop = first
        while stop < len(ids):
            start = stop
            while stop < min(start + command.batch_size, len(ids)) and stop_ids[stop] == stop_ids[start]:
                stop += 1
            options = replace(
                config,
                seed=[seed + i for i in range(start, stop)],
                eos_token_ids=stop_ids[start],
                return_state=False,
                on_prefill=timer.on_prefill,
                on_token=lambda *_: timer.on_token(),
            )
            state = None if memory is None else build_row_caches(memory, range(start, stop))
            generations = limit.generate(tokenizer, ids[start:stop], state, options)
            timer.add(generations)
            yield from (generation_to_json(generation, command.logprobs) for generation in generations)

    write_rows(rows, command.output, key, results)
    log_message(timer.describe())
    limit.log_ended()


def write_rows(
    rows: Sequence[PromptRow],
    output: Path | None,
    key: Callable[[], str],
    results: Callable[[int], Iterator[dict[str, Any]]],
) -> None:
    """Write each row as JSON, with its fields and a field `generation`.

    Without `output`, rows go to standard output. With it, they are collected in OUTPUT.part, which is renamed at the
    end and which the same command continues after an interruption: `results` returns the generations of the rows from
    an index on, and `key` a hash of all that determines the output. The errors are those of `PartialOutput`.
    """
    part, first = None, 0
    if output is not None:
        part = PartialOutput(output.with_name(f"{output.name}.part"), key())
        first = part.num_rows
        if first:
            log_message(f"{part.path}: {first:,} of {len(rows):,} rows are done; continuing")
    try:
        with progress("generating,") as show:
            for row, generation in zip(rows[first:], results(first), strict=True):
                line = json.dumps(row.source | {"generation": generation}, ensure_ascii=False)
                if part is None:
                    write_text(f"{line}\n")
                else:
                    part.append(line)
                first += 1
                show("rows", first, len(rows))
    except KeyboardInterrupt:
        if part is not None:
            log_message(f"{part.path}: {first:,} of {len(rows):,} rows are done; the same command continues")
        raise
    if output is not None and part is not None:
        part.finish(output)
        log_message(f"wrote {output}, {len(rows):,} rows")


def list_options(config: GenerationConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if not name.startswith("on_")}


def hash_memory_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file of the memories; a peft cartridge is a folder with files."""
    files = [file for path in paths for file in (sorted(path.glob("adapter_*")) if path.is_dir() else [path])]
    return [hash_file(file)[1] for file in files]


class PartialOutput:
    """OUTPUT.part: a line with the key of the command, then the rows that are done, each after a hash of all so far.

    Raises CorruptArtifactError if a row was changed; UsageError if it was begun with another key.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.num_rows, self.digest = path, 0, key
        with translate_os_errors(path):
            if not path.exists():
                write_text_atomically(path, f"{key}\n")
                return
            with path.open(encoding="utf-8", errors="replace") as file:
                self.read(file)
            truncate_partial_line(path)

    def read(self, file: TextIO) -> None:
        """Check the key and the rows of an open file; count the rows, without a partial one at the end."""
        if file.readline() != f"{self.digest}\n":
            raise UsageError(
                f"{self.path} was begun with other rows, flags or weights; repeat that command or delete the file"
            )
        for number, line in enumerate(takewhile(lambda line: line.endswith("\n"), file), 2):
            digest, _, row = line.rstrip("\n").partition(" ")
            self.num_rows, self.digest = self.num_rows + 1, hash_line(self.digest, row)
            if digest != self.digest:
                raise CorruptArtifactError(f"{self.path}:{number}: was changed after it was written; delete the file")

    def append(self, row: str) -> None:
        self.num_rows, self.digest = self.num_rows + 1, hash_line(self.digest, row)
        with translate_os_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self.digest} {row}\n")

    def finish(self, output: Path) -> None:
        """Write the rows alone to OUTPUT, and delete OUTPUT.part; raise `BusyError` if OUTPUT was made meanwhile."""
        if output.exists():
            raise BusyError(
                f"{output} exists by now; the rows are in {self.path}: delete {output} and repeat the command"
            )

        def copy(new: Path) -> None:
            with self.path.open("rb") as source, new.open("wb") as target:
                source.readline()
                for line in source:
                    target.write(line.partition(b" ")[2])

        write_file_atomically(output, copy, self.path.stat().st_size)
        os.unlink(self.path)
