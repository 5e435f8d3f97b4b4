"""`laconic generate --memory` with a plain checkpoint: prompts that follow KV memories."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from laconic.cli.arguments import parse_dtype, refuse_flags
from laconic.cli.generate_output import GenerationPrinter
from laconic.cli.generate_prompts import PromptRow
from laconic.console import status
from laconic.errors import UsageError

if TYPE_CHECKING:
    from laconic.cli.generate import GenerateCommand
    from laconic.compression.kv_memory import KVMemory
    from laconic.data.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 128
BATCH_FLAGS = ("messages", "input", "output", "system")


def generate_with_kv_memory(command: "GenerateCommand") -> int:
    """Continue prompts on memories: one prompt per text, one prompt for all texts, or one text for all prompts."""
    import laconic
    from laconic.experiment.kv_compressor import load_kv_memories

    refuse_flags({name: getattr(command, name) for name in BATCH_FLAGS}, "not available with --memory")
    rows = command.read_prompts()
    with status(f"loading {command.model}"):
        decoder = laconic.Decoder.from_pretrained(
            command.model, dtype=parse_dtype(command.dtype), device=command.device, revision=command.revision
        )
        tokenizer = laconic.load_tokenizer(decoder.source_folder or command.model)
        memory = load_kv_memories(command.memory, decoder, tokenizer)
    rows, memory = match_rows(rows, memory)
    ids = [encode_after_memory(row, tokenizer, memory) for row in rows]
    used = int(memory.num_tokens.max()) + max(map(len, ids))
    limit = decoder.config.max_position_embeddings
    if used >= limit and not command.allow_long_prompt:
        raise UsageError(
            f"the memory's text and the prompt have {used:,} tokens, the context of {command.model} {limit:,}; "
            "compress a shorter text, or go on with --allow-long-prompt"
        )
    max_tokens = command.max_tokens or max(1, min(DEFAULT_MAX_TOKENS, limit - used))
    config = replace(
        command.sampling_config(max_tokens, decoder.source_folder),
        min_tokens=command.min_tokens,
        eos_token_ids=command.eos_token_ids(rows, decoder, tokenizer),
    )
    labels = [row.text or "" if row.should_echo and not command.no_echo else "" for row in rows]
    printer = GenerationPrinter(labels, is_silent=command.format == "json")
    generations = laconic.generate(
        decoder, tokenizer, input_ids=ids, state=memory.to_cache(), config=printer.attach(config)
    )
    command.print_generations([row.to_json() for row in rows], generations, decoder, printer)
    return 0


def match_rows(rows: Sequence[PromptRow], memory: "KVMemory") -> tuple[list[PromptRow], "KVMemory"]:
    """Return as many prompts as texts. Raises `UsageError` (2) for other numbers than one and the same."""
    if len(rows) != memory.B and 1 not in (len(rows), memory.B):
        raise UsageError(f"{len(rows)} prompts for a memory of {memory.B} texts; give one prompt, or one per text")
    if memory.B == 1:
        return list(rows), memory.select_rows([0] * len(rows))
    return list(rows) * (memory.B if len(rows) == 1 else 1), memory


def encode_after_memory(row: PromptRow, tokenizer: "Tokenizer", memory: "KVMemory") -> list[int]:
    """Return the ids of a prompt after a memory; a memory of a chat is continued as a chat."""
    from laconic.experiment.kv_compressor import encode_prompt

    if memory.metadata is not None and memory.metadata.chat:
        return encode_prompt(tokenizer, memory, row.text if row.text is not None else row.messages[-1]["content"])
    return row.encode(tokenizer) if row.text is None else encode_prompt(tokenizer, memory, row.text)
