"""Limits of the server, each of which a request that exceeds it is refused by with a 4xx status."""

from dataclasses import dataclass

MEBIBYTE = 2**20


@dataclass(frozen=True)
class ServerLimits:
    """What requests may ask for.

    Args:
        max_body_bytes: Bytes of a JSON body (413).
        max_memory_bytes: Bytes of an uploaded memory file (413).
        max_prompt_tokens: Tokens of a prompt (400); None: the context of the model.
        max_generated_tokens: Largest `max_tokens` (400), and the default of chat completions.
        max_batch_size: Sequences that are decoded together; further ones wait.
        max_queue: Sequences that wait, and the largest number that one request may ask for (429).
        max_seconds: Seconds of a request: a generation ends with `finish_reason` "length", anything else with 408.
        max_memories: Stored memories (400).
        max_sessions: Sessions of a model that learns (400).
    """

    max_body_bytes: int = 8 * MEBIBYTE
    max_memory_bytes: int = 512 * MEBIBYTE
    max_prompt_tokens: int | None = None
    max_generated_tokens: int = 4096
    max_batch_size: int = 16
    max_queue: int = 64
    max_seconds: float = 600.0
    max_memories: int = 256
    max_sessions: int = 64
