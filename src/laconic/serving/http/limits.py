"""Limits of the server. A request that exceeds one is refused with a 4xx status."""

from dataclasses import dataclass

MEBIBYTE = 2**20


@dataclass(frozen=True)
class ServerLimits:
    """Limits of requests; the status of the error is in parentheses.

    Args:
        max_body_bytes: Bytes of a JSON body (413).
        max_memory_bytes: Bytes of an uploaded memory or state (413).
        max_prompt_tokens: Tokens of a prompt (400); None: the context of the model.
        max_generated_tokens: New tokens of a sequence, to which `max_tokens` is lowered; None: as many as the context
            of the model has room for.
        max_batch_size: Number of sequences that are decoded together; further ones wait.
        max_queue: Number of sequences that may wait, and that one request may ask for (429).
        max_seconds: Time limit of a request; generation then ends with `finish_reason` "length", other work with 408.
        max_memories: Number of stored memories (400).
        max_sessions: Number of sessions of a model that learns (400).
    """

    max_body_bytes: int = 8 * MEBIBYTE
    max_memory_bytes: int = 512 * MEBIBYTE
    max_prompt_tokens: int | None = None
    max_generated_tokens: int | None = None
    max_batch_size: int = 16
    max_queue: int = 64
    max_seconds: float = 600.0
    max_memories: int = 256
    max_sessions: int = 64
