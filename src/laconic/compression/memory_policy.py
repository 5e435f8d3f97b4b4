"""Memory policies: what is kept of the older memory after a segment, and how many vectors fit the model.

Accumulation is that of AutoCompressors (arXiv:2305.14788), replacement that of RMT (arXiv:2207.06881).

Symbols: M_i memory after segment i, sigma^i its vectors, N_i their number; K summary positions per segment.
"""

from dataclasses import replace
from typing import NamedTuple

from jaxtyping import Bool, Float, Float32
from torch import Tensor

from laconic.compression.memory import SummaryMemory
from laconic.compression.segment import resolve_position_scheme
from laconic.config.methods import CompressionConfig
from laconic.errors import UsageError
from laconic.models.config import DecoderConfig


class SegmentVectors(NamedTuple):
    """The vectors of a segment, which of them are valid, and their log survival if lengths are soft."""

    vectors: Float[Tensor, "B n D"]
    valid: Bool[Tensor, "B n"]
    log_s: Float32[Tensor, "B n"] | None = None


def exceeds_budget(memory: SummaryMemory, segment_vectors: SegmentVectors, budget: int) -> Bool[Tensor, " B"]:
    """Eq. VL27: mark rows whose vectors would exceed the budget, so that their memory is recompressed first."""
    return (memory.num_vectors + segment_vectors.valid.sum(1) > budget) & (memory.num_vectors > 0)


def drop_oldest_segments(memory: SummaryMemory, budget: int) -> SummaryMemory:
    """Eq. VL28: drop whole segments, oldest first, until each row has at most `budget` vectors."""
    lengths = memory.vectors_per_segment
    from_here_on = lengths.flip(1).cumsum(1).flip(1)  # vectors of a segment and all later ones
    stays = from_here_on.gather(1, memory.segment_ids.clamp(min=0)) <= budget
    return memory.mask_slots(stays).compact()


def num_summary_positions(config: CompressionConfig) -> int:
    """Return how many columns a compression adds after the text."""
    if config.summary == "parallel":
        return config.fixed_length
    if config.summary == "autoregressive":
        return config.fixed_length + (config.trigger_placement == "insert")
    return 0


def find_smallest_window(decoder_config: DecoderConfig) -> int | None:
    return min((window for window in decoder_config.sliding_windows if window is not None), default=None)


def max_memory_vectors(
    decoder_config: DecoderConfig,
    config: CompressionConfig,
    prefix_length: int,
    segment_tokens: int,
    *,
    compresses: bool = True,
) -> int | None:
    """Eq. AC1: return how many memory vectors fit in front of a segment; None if there is no limit.

    The number is negative if the segment alone is too long. `prefix_length` counts bos; summary positions follow the
    text unless it is only read (`compresses`). With "zero" positions only the text takes position ids.
    """
    n = num_summary_positions(config) if compresses else 0
    window, P = find_smallest_window(decoder_config), decoder_config.max_position_embeddings
    limits = [] if window is None else [window - prefix_length - segment_tokens - n]
    if resolve_position_scheme(config, decoder_config) != "zero":
        limits.append(P - prefix_length - segment_tokens - n)
    elif prefix_length + segment_tokens > P:
        limits.append(-1)
    return min(limits, default=None)


def max_segment_tokens(decoder_config: DecoderConfig, config: CompressionConfig, prefix_length: int) -> int:
    """Return how many tokens a segment can have that follows no memory; 0 or less if none fits."""
    longest = decoder_config.max_position_embeddings - prefix_length
    room = max_memory_vectors(decoder_config, config, prefix_length, segment_tokens=0)
    return longest if room is None else min(longest, room)


def check_fits(
    decoder_config: DecoderConfig,
    config: CompressionConfig,
    prefix_length: int,
    segment_tokens: int,
    num_slots: int,
    *,
    compresses: bool = True,
) -> None:
    """Raise `UsageError` if memory, text and summary positions exceed the model's positions or sliding window."""
    if not (num_slots or compresses):  # a text alone may exceed the sliding window
        decoder_config = replace(decoder_config, sliding_windows=(None,) * decoder_config.num_hidden_layers)
    room = max_memory_vectors(decoder_config, config, prefix_length, segment_tokens, compresses=compresses)
    if room is None or num_slots <= room:
        return
    n = num_summary_positions(config) if compresses else 0
    window = find_smallest_window(decoder_config)
    limit = f"{decoder_config.max_position_embeddings} positions"
    limit += "" if window is None else f" and a sliding window of {window}"
    longest = max_segment_tokens(decoder_config, config, prefix_length) if compresses and num_slots == 0 else 0
    hint = 'shorter segments or prompts, or memory_policy = "budgeted", "fifo" or "replace"'
    raise UsageError(
        f"{num_slots} memory vectors, {segment_tokens} text tokens and {n} summary positions"
        f"{' and bos' if prefix_length else ''} do not fit: {decoder_config.family} has {limit}; use "
        + (f"segments of at most {longest} tokens" if longest > 0 else hint)
    )
