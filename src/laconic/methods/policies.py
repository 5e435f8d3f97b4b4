"""What of the older memory stays when a segment has been compressed, and how many segments a model has room for.

Accumulation is AutoCompressors' (arXiv:2305.14788), replacement RMT's (arXiv:2207.06881).

Symbols: M_i memory after segment i, sigma^i its vectors, N_i their number; K places a segment.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from laconic.core.errors import Usage
from laconic.core.families import DecoderConfig
from laconic.core.memory import Memory
from laconic.methods.segments import positions_of
from laconic.methods.settings import Reading


class Kept(NamedTuple):
    """The vectors of a segment, which of them are there, and their log survival where lengths are soft."""

    vectors: Float[Tensor, "B n D"]
    live: Bool[Tensor, "B n"]
    log_s: Float32[Tensor, "B n"] | None = None


def over(memory: Memory, kept: Kept, budget: int) -> Bool[Tensor, " B"]:
    """Eq. VL27: rows whose live total would pass the budget, so that their memory is first replaced by its summary."""
    return (memory.lengths + kept.live.sum(1) > budget) & (memory.lengths > 0)


def fifo(memory: Memory, budget: int) -> Memory:
    """Eq. VL28: without its oldest blocks, whole ones, until at most `budget` slots of a row are live."""
    lengths = memory.block_lengths
    since = lengths.flip(1).cumsum(1).flip(1)  # live slots of a block and all later ones
    stays = since.gather(1, memory.block.clamp(min=0)) <= budget
    return memory.only(stays).pack()


def grown(memory: Memory, kept: Kept, tokens: Int[Tensor, " B"], reading: Reading) -> Memory:
    """M_i of M_{i-1} and sigma^i by the memory of the settings, one that is budgeted having been cut before."""
    if reading.memory == "replace":
        return memory.replaced(kept.vectors, kept.live, tokens, kept.log_s).pack()
    both = memory.append(kept.vectors, kept.live, tokens, kept.log_s).pack()
    if reading.memory == "fifo" and reading.budget is not None:
        return fifo(both, reading.budget)
    return both


def places(reading: Reading) -> int:
    """Columns that compressing adds behind a text."""
    return {"parallel": reading.fixed, "self": reading.fixed + (reading.trigger == "insert")}.get(reading.generator, 0)


def room(config: DecoderConfig, reading: Reading, bos: int, segment: int, *, writes: bool = True) -> int | None:
    """Eq. AC1: how many vectors may stand before a segment of so many tokens and its places; None: any number.

    Less than 0 where the segment alone is too long. With zero positions only the text takes any. A text that is only
    read, so that it `writes` nothing, has no places behind it.
    """
    n = places(reading) if writes else 0
    zero = positions_of(reading, config) == "zero"
    windows = [window for window in config.windows if window is not None]
    P = config.max_position_embeddings
    found = [P - bos - segment - n] if not zero else [] if bos + segment <= P else [-1]
    found += [min(windows) - bos - segment - n] if windows else []
    return min(found, default=None)


def most(config: DecoderConfig, reading: Reading, bos: int, segment: int) -> int | None:
    """How many segments of so many tokens a memory that grows can be read with; None: any number."""
    left = room(config, reading, bos, segment)
    if left is None or (reading.memory != "accumulate" and left >= (reading.budget or reading.fixed)):
        return None
    return max(left // reading.fixed + 1, 0) if left >= 0 else 0


def check_room(
    config: DecoderConfig, reading: Reading, bos: int, segment: int, slots: int, *, writes: bool = True
) -> None:
    """Raises `Usage` (2) where memory, text and places are more than the model has positions or windows for."""
    left = room(config, reading, bos, segment, writes=writes)
    if left is None or slots <= left:
        return
    windows = [window for window in config.windows if window is not None]
    P, n = config.max_position_embeddings, places(reading) if writes else 0
    limit = f"{P} positions"
    if windows and min(windows) < bos + slots + segment + n:
        limit = f"a sliding window of {min(windows)}"
    asked = f"{slots} vectors, {segment} tokens and {n} places" + (" and bos" if bos else "")
    if slots == 0 or reading.memory != "accumulate":
        raise Usage(f"segment: {asked}, {config.family} has {limit}; take shorter segments")
    held = most(config, reading, bos, segment)
    raise Usage(
        f"segment: {asked}, {config.family} has {limit}: memory that accumulates ends after {held} segments of "
        f'{segment}; take memory "budgeted", "fifo" or "replace"'
    )
