"""JSONL in and out for `laconic generate`: rows in order, written as they end, resumed after an interruption."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cli.generate_kv import build_row_caches, hash_memory_files
from laconic.cli.generate_output import GenerationTimer, generation_to_json, write_text
from laconic.cli.generate_prompts import PromptRow
from laconic.compression.kv_memory import KVMemory
from laconic.console import log_message, progress
from laconic.data.tokenizer import Tokenizer
from laconic.errors import BusyError, UsageError, translate_os_errors
from laconic.generation.config import GenerationConfig
from laconic.generation.generate import Generation, generate
from laconic.models.decoder import Decoder
from laconic.storage.atomic import write_file_atomically
from laconic.storage.manifest import hash_json
from laconic.storage.run_dir import truncate_partial_line

if TYPE_CHECKING:
    from laconic.cli.generate import GenerateCommand


def generate_rows(
    command: "GenerateCommand",
    decoder: Decoder,
    tokenizer: Tokenizer,
    rows: Sequence[PromptRow],
    ids: Sequence[list[int]],
    config: GenerationConfig,
    memory: KVMemory | None = None,
) -> None:
    """Generate for all rows and write each as JSON, with its fields and a field `generation`.

    Without --output, rows go to standard output. With it, they are collected in OUTPUT.part, which is renamed at the
    end and which the same command continues after an interruption. Row i samples with seed + i.

    Args:
        command: The flags: output, batch size, log probabilities, memory files.
        decoder: The model.
        tokenizer: Its tokenizer.
        rows: The prompts.
        ids: Token ids of the prompts.
        config: Options of generation; `seed` is that of the first row.
        memory: Memory that the prompts follow, of one text for all of them or of one for each.

    Raises:
        UsageError: OUTPUT.part was begun with other rows, options or weights.
        BusyError: The output exists.
    """
    output, batch_size, should_add_logprobs = command.output, command.batch_size, command.logprobs
    timer, first = GenerationTimer(shows_progress=False), 0
    part = None if output is None else output.with_name(f"{output.name}.part")
    if output is not None and part is not None:
        if output.exists():
            raise BusyError(f"--output {output} exists; delete it or choose another file")
        key = batch_key(decoder, rows, config, [should_add_logprobs, *hash_memory_files(command.memory)])
        first = open_partial(part, key)
    if first:
        log_message(f"{part}: {first:,} of {len(rows):,} rows are done; continuing")
    batches = generate_batches(decoder, tokenizer, ids, config, batch_size, first, timer, memory)
    try:
        with progress("generating,") as show:
            for row, generation in zip(rows[first:], batches, strict=True):
                result = row.source | {"generation": generation_to_json(generation, should_add_logprobs)}
                line = json.dumps(result, ensure_ascii=False)
                if part is None:
                    write_text(f"{line}\n")
                else:
                    append_line(part, line)
                first += 1
                show("rows", first, len(rows))
    except KeyboardInterrupt:
        if part is not None:
            log_message(f"{part}: {first:,} of {len(rows):,} rows are done; the same command continues")
        raise
    if output is not None and part is not None:
        finish_partial(part, output)
        log_message(f"wrote {output}, {len(rows):,} rows")
    log_message(timer.describe())


def generate_batches(
    decoder: Decoder,
    tokenizer: Tokenizer,
    ids: Sequence[list[int]],
    config: GenerationConfig,
    batch_size: int,
    first: int,
    timer: GenerationTimer,
    memory: KVMemory | None,
) -> Iterator[Generation]:
    """Yield the result of each row from `first` on, generating `batch_size` rows at a time."""
    seed = config.seed
    assert isinstance(seed, int)
    for start in range(first, len(ids), batch_size):
        batch = list(ids[start : start + batch_size])
        seeds = [seed + start + i for i in range(len(batch))]
        options = replace(
            config, seed=seeds, return_state=False, on_prefill=timer.on_prefill, on_token=lambda *_: timer.on_token()
        )
        state = None if memory is None else build_row_caches(memory, range(start, start + len(batch)))
        generations = generate(decoder, tokenizer, input_ids=batch, state=state, config=options)
        timer.add(generations)
        yield from generations


def batch_key(decoder: Decoder, rows: Sequence[PromptRow], config: GenerationConfig, more: Sequence[object]) -> str:
    """Return a hash of all that determines the output: `more` are flags and the hashes of memories."""
    options = {name: value for name, value in asdict(config).items() if not name.startswith("on_")}
    prompts = [row.to_json() | {"source": row.source} for row in rows]
    return hash_json([decoder.fingerprint, str(decoder.config.dtype), options, prompts, *more])


def open_partial(part: Path, key: str) -> int:
    """Create OUTPUT.part, or return the number of rows that are done in it. Its first line is the key."""
    with translate_os_errors(part):
        if not part.exists():
            part.write_text(f"{key}\n", encoding="utf-8")
            return 0
        truncate_partial_line(part)
        with part.open(encoding="utf-8") as file:
            first_line, num_rows = file.readline(), sum(1 for _ in file)
    if first_line != f"{key}\n":
        raise UsageError(f"{part} was begun with other rows, flags or weights; repeat that command or delete the file")
    return num_rows


def append_line(part: Path, line: str) -> None:
    """Append a row to OUTPUT.part."""
    with translate_os_errors(part), part.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def finish_partial(part: Path, output: Path) -> None:
    """Write OUTPUT without the key of OUTPUT.part, and delete the latter."""

    def copy(new: Path) -> None:
        with part.open("rb") as source, new.open("wb") as target:
            source.readline()
            while block := source.read(1 << 20):
                target.write(block)

    write_file_atomically(output, copy, part.stat().st_size)
    os.unlink(part)
