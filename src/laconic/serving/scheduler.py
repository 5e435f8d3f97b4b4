"""Choose how many prompt positions an engine step reads, so that the decoding rows do not wait too long."""

from collections.abc import Sequence

STEP_SECONDS = 0.15  # target for a step with decoding rows; leaves a margin to the 200 ms that a token may take
MIN_PROMPT_SHARE = 0.25  # prompts get at least this share of the decoding time, even if decoding exceeds the target
PREFILL_SECONDS = 0.5  # target for a step without decoding rows; new and cancelled requests wait for its end
MIN_CHUNK, FIRST_CHUNK = 4, 16  # positions
MIN_CHUNK_SECONDS = 1e-3  # lower bound of the measured cost of a chunk, which noise can hide
AVERAGE_WEIGHT = 0.5  # weight of the last step in the moving averages
MAX_GROWTH = 2  # largest ratio of a chunk's size to that of the last one


class ChunkSizer:
    """Choose the number of prompt positions of the next step from the measured time of the last ones.

    Times are wall-clock times, so the target holds on a slow or busy machine too. The cost of a chunk has a part that
    does not depend on its length, because the keys of its row are read once. The time per position ignores this, but
    chunk sizes still converge to the target within a few steps.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.last_size = FIRST_CHUNK
        self.chosen_size = 0
        self.decode_seconds = 0.0  # time of a step without prompts
        self.position_seconds = 0.0  # time per prompt position; 0: not measured yet

    def choose(self, num_decoding: int) -> int:
        """Return the number of prompt positions to read beside `num_decoding` rows."""
        size = FIRST_CHUNK
        if self.position_seconds:
            shared = max(STEP_SECONDS - self.decode_seconds, MIN_PROMPT_SHARE * self.decode_seconds)
            seconds = shared if num_decoding else PREFILL_SECONDS
            size = max(MIN_CHUNK, min(int(seconds / self.position_seconds), MAX_GROWTH * self.last_size))
        self.chosen_size = min(size, self.max_size)
        return self.chosen_size

    def record(self, seconds: float, num_decoding: int, num_positions: int) -> None:
        """Update the averages with the time of a step."""
        if not num_positions:
            before = self.decode_seconds or seconds
            self.decode_seconds = before + AVERAGE_WEIGHT * (seconds - before)
            return
        if num_decoding:
            self.decode_seconds = min(self.decode_seconds, seconds)  # rows may have left since it was measured
        if self.position_seconds and 2 * num_positions < self.chosen_size:
            return  # the end of a prompt or a few latents; too short to estimate the cost of a long chunk
        prompt_seconds = seconds - (self.decode_seconds if num_decoding else 0)
        per_position = max(prompt_seconds, MIN_CHUNK_SECONDS) / num_positions
        before = self.position_seconds or per_position
        self.position_seconds = before + AVERAGE_WEIGHT * (per_position - before)
        self.last_size = num_positions


def share_positions(remaining: Sequence[int], size: int) -> list[int]:
    """Divide `size` positions among prompts as evenly as the positions that each has left allow."""
    shares = [0] * len(remaining)
    left = size
    order = sorted(range(len(remaining)), key=lambda i: remaining[i])
    for rank, i in enumerate(order):
        shares[i] = min(remaining[i], -(-left // (len(order) - rank)))
        left -= shares[i]
    return shares
