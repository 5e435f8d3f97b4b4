"""What of the older memory stays when a segment has been compressed, and how many segments a model has room for.

Accumulation is AutoCompressors' (arXiv:2305.14788), replacement RMT's (arXiv:2207.06881).

Symbols: M_i memory after segment i, sigma^i its vectors, N_i their number; K places a segment.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from laconic.compression.memory import SummaryMemory
from laconic.compression.segment import resolve_position_scheme
from laconic.config.methods import CompressionConfig
from laconic.errors import UsageError
from laconic.models.config import DecoderConfig


class SegmentVectors(NamedTuple):
    """The vectors of a segment, which of them are there, and their log survival where lengths are soft."""

    vectors: Float[Tensor, "B n D"]
    valid: Bool[Tensor, "B n"]
    log_s: Float32[Tensor, "B n"] | None = None


def exceeds_budget(memory: SummaryMemory, segment_vectors: SegmentVectors, budget: int) -> Bool[Tensor, " B"]:
    """Eq. VL27: rows whose live total would pass the budget, so that their memory is first replaced by its summary."""
    return (memory.num_vectors + segment_vectors.valid.sum(1) > budget) & (memory.num_vectors > 0)


def drop_oldest_segments(memory: SummaryMemory, budget: int) -> SummaryMemory:
    """Eq. VL28: without its oldest blocks, whole ones, until at most `budget` slots of a row are live."""
    lengths = memory.vectors_per_segment
    since = lengths.flip(1).cumsum(1).flip(1)  # live slots of a block and all later ones
    stays = since.gather(1, memory.segment_ids.clamp(min=0)) <= budget
    return memory.mask_slots(stays).compact()


def update_memory(
    memory: SummaryMemory, segment_vectors: SegmentVectors, num_tokens: Int[Tensor, " B"], config: CompressionConfig
) -> SummaryMemory:
    """M_i of M_{i-1} and sigma^i by the memory of the settings, one that is budgeted having been cut before."""
    if config.memory_policy == "replace":
        return memory.overwrite(
            segment_vectors.vectors, segment_vectors.valid, num_tokens, segment_vectors.log_s
        ).compact()
    both = memory.append(segment_vectors.vectors, segment_vectors.valid, num_tokens, segment_vectors.log_s).compact()
    if config.memory_policy == "fifo" and config.max_memory_vectors is not None:
        return drop_oldest_segments(both, config.max_memory_vectors)
    return both


def num_summary_positions(config: CompressionConfig) -> int:
    """Columns that compressing adds behind a text."""
    return {
        "parallel": config.fixed_length,
        "autoregressive": config.fixed_length + (config.trigger_placement == "insert"),
    }.get(config.summary, 0)


def max_memory_vectors(
    decoder_config: DecoderConfig,
    config: CompressionConfig,
    prefix_length: int,
    segment_tokens: int,
    *,
    compresses: bool = True,
) -> int | None:
    """Eq. AC1: how many vectors may stand before a segment of so many tokens and its places; None: any number.

    Less than 0 where the segment alone is too long. With zero positions only the text takes any. A text that is only
    read, so that it `writes` nothing, has no places behind it.
    """
    n = num_summary_positions(config) if compresses else 0
    zero = resolve_position_scheme(config, decoder_config) == "zero"
    windows = [window for window in decoder_config.sliding_windows if window is not None]
    P = decoder_config.max_position_embeddings
    found = (
        [P - prefix_length - segment_tokens - n] if not zero else [] if prefix_length + segment_tokens <= P else [-1]
    )
    found += [min(windows) - prefix_length - segment_tokens - n] if windows else []
    return min(found, default=None)


def max_segments(
    decoder_config: DecoderConfig, config: CompressionConfig, prefix_length: int, segment_tokens: int
) -> int | None:
    """How many segments of so many tokens a memory that grows can be read with; None: any number."""
    left = max_memory_vectors(decoder_config, config, prefix_length, segment_tokens)
    if left is None or (
        config.memory_policy != "accumulate" and left >= (config.max_memory_vectors or config.fixed_length)
    ):
        return None
    return max(left // config.fixed_length + 1, 0) if left >= 0 else 0


def check_fits(
    decoder_config: DecoderConfig,
    config: CompressionConfig,
    prefix_length: int,
    segment_tokens: int,
    num_slots: int,
    *,
    compresses: bool = True,
) -> None:
    """Raises `Usage` (2) where memory, text and places are more than the model has positions or windows for."""
    left = max_memory_vectors(decoder_config, config, prefix_length, segment_tokens, compresses=compresses)
    if left is None or num_slots <= left:
        return
    windows = [window for window in decoder_config.sliding_windows if window is not None]
    P, n = decoder_config.max_position_embeddings, num_summary_positions(config) if compresses else 0
    limit = f"{P} positions"
    if windows and min(windows) < prefix_length + num_slots + segment_tokens + n:
        limit = f"a sliding window of {min(windows)}"
    asked = f"{num_slots} vectors, {segment_tokens} tokens and {n} places" + (" and bos" if prefix_length else "")
    if num_slots == 0 or config.memory_policy != "accumulate":
        raise UsageError(f"segment: {asked}, {decoder_config.family} has {limit}; take shorter segments")
    held = max_segments(decoder_config, config, prefix_length, segment_tokens)
    raise UsageError(
        f"segment: {asked}, {decoder_config.family} has {limit}: memory that accumulates ends after {held} segments of "
        f'{segment_tokens}; take memory "budgeted", "fifo" or "replace"'
    )
