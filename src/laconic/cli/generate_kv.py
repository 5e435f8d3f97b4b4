"""`laconic generate --memory` with a plain checkpoint: prompts and messages that follow KV memories."""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.cli.generate_prompts import PromptRow, to_chat

if TYPE_CHECKING:
    from laconic.compression.kv_memory import KVMemory
    from laconic.data.tokenizer import Tokenizer


def match_rows(rows: Sequence[PromptRow], memory: "KVMemory") -> list[PromptRow]:
    """Return as many prompts as texts: one text serves all prompts, and one prompt all texts.

    A prompt after a memory of a chat is a user message.

    Raises:
        UsageError: For other numbers of prompts than one and that of the texts.
    """
    from laconic.experiment.kv_compressor import is_chat_memory
    from laconic.experiment.text_model import match_prompts

    return match_prompts([to_chat(row, None) for row in rows] if is_chat_memory(memory) else rows, memory.B)


def encode_after_memory(row: PromptRow, tokenizer: "Tokenizer", memory: "KVMemory") -> list[int]:
    from laconic.experiment.kv_compressor import encode_messages, encode_prompt

    if row.text is None:
        return encode_messages(tokenizer, memory, row.messages)
    return encode_prompt(tokenizer, memory, row.text)


def hash_memory_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file of the memories, of which a peft cartridge is a folder."""
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    return [sha256(file.read_bytes()).hexdigest() for file in files]
