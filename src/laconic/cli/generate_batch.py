"""JSONL in and out for `laconic generate`: rows in order, written as they end, resumed after an interruption."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.generate_context import ContextLimit
from laconic.cli.generate_output import GenerationTimer, generation_to_json, write_text
from laconic.cli.generate_prompts import PromptRow, find_row_stop_ids
from laconic.compression.kv.memory import KVMemory
from laconic.console import log_message, progress
from laconic.data.tokenizer import Tokenizer
from laconic.errors import BusyError, UsageError, translate_os_errors
from laconic.experiment.text_models.kv_compressor import build_row_caches
from laconic.generation.config import GenerationConfig
from laconic.storage.atomic import write_file_atomically, write_text_atomically
from laconic.storage.manifest import hash_file, hash_json
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
    an index on, and `key` a hash of all that determines the output.
    """
    part = None if output is None else output.with_name(f"{output.name}.part")
    first = 0 if part is None else open_partial_output(part, key())
    if first:
        log_message(f"{part}: {first:,} of {len(rows):,} rows are done; continuing")
    try:
        with progress("generating,") as show:
            for row, generation in zip(rows[first:], results(first), strict=True):
                write_row(row.source | {"generation": generation}, part)
                first += 1
                show("rows", first, len(rows))
    except KeyboardInterrupt:
        if part is not None:
            log_message(f"{part}: {first:,} of {len(rows):,} rows are done; the same command continues")
        raise
    if output is not None and part is not None:
        finish_output(part, output)
        log_message(f"wrote {output}, {len(rows):,} rows")


def write_row(row: dict[str, Any], part: Path | None) -> None:
    line = json.dumps(row, ensure_ascii=False)
    if part is None:
        write_text(f"{line}\n")
        return
    with translate_os_errors(part), part.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def open_partial_output(path: Path, key: str) -> int:
    """Begin OUTPUT.part with a line for the key, or return its number of rows; `UsageError` if its key is another."""
    with translate_os_errors(path):
        if not path.exists():
            write_text_atomically(path, f"{key}\n")
        with path.open(encoding="utf-8", errors="replace") as file:
            if file.readline() != f"{key}\n":
                raise UsageError(
                    f"{path} was begun with other rows, flags or weights; repeat that command or delete the file"
                )
            truncate_partial_line(path)
            return sum(line.endswith("\n") for line in file)


def finish_output(part: Path, output: Path) -> None:
    """Write the rows alone to OUTPUT, and delete OUTPUT.part; raise `BusyError` if OUTPUT was made meanwhile."""
    if output.exists():
        raise BusyError(f"{output} exists by now; the rows are in {part}: delete {output} and repeat the command")

    def copy(new: Path) -> None:
        with part.open("rb") as source, new.open("wb") as target:
            source.readline()
            shutil.copyfileobj(source, target)

    write_file_atomically(output, copy, part.stat().st_size)
    part.unlink()


def list_options(config: GenerationConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if not name.startswith("on_")}


def hash_memory_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file of the memories; a peft cartridge is a folder with files."""
    files = [file for path in paths for file in (sorted(path.glob("adapter_*")) if path.is_dir() else [path])]
    return [hash_file(file)[1] for file in files]
