"""What to do when memory does not suffice for an update: halve the micro-batch, or say how to save memory."""

import torch

from laconic.errors import ALLOCATION_ERRORS, OutOfMemoryError

MEMORY_ADVICE = (
    'set activation_checkpointing = 1, precision = "bfloat16", trainable = "lora", a smaller micro_batch_size '
    "or shorter rows"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a device or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        text in str(error) for text in ALLOCATION_ERRORS
    )


def halve_micro_batch(size: int, can_halve: bool, error: BaseException) -> int:
    """Return half of the rows of a micro-batch for which an allocation failed.

    Raises:
        OutOfMemoryError: If it has one row, or may not be halved.
    """
    if size == 1 or not can_halve:
        raise OutOfMemoryError(f"out of memory with a micro-batch of {size} rows; {MEMORY_ADVICE}") from error
    return size // 2
