"""How much of the waiting prompts a step reads: no more than the decoding rows can wait for."""

from collections.abc import Sequence

STEP_SECONDS = 0.15  # target of a step with decoding rows; leaves a margin to the 200 ms that a token may take
MIN_PROMPT_SHARE = 0.25  # of a decode step's time goes to prompts at least, where decoding alone takes that long
PREFILL_SECONDS = 0.5  # the same for a step without, after which requests that arrive or are cancelled are looked at
MIN_CHUNK, FIRST_CHUNK = 4, 16
LEAST_SECONDS = 1e-3  # of a chunk, where noise hides its cost
WEIGHT = 0.5  # of the last step in the moving averages
MAX_GROWTH = 2  # of the chunk from one step to the next


class ChunkSizer:
    """Choose the number of prompt positions of the next step from the measured time of the last ones.

    Times are those of the wall clock, so that the target holds on a slow or busy machine too. A chunk costs a part
    that does not depend on its length (its row's keys are read once) and one that does. Dividing the time by the length
    still leads to the target, in a few steps.

    Args:
        max_size: Largest number of positions.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size, self.last_size = max_size, FIRST_CHUNK
        self.chosen_size = 0
        self.decode_seconds = 0.0  # of a step without prompts
        self.position_seconds = 0.0  # of a prompt position; 0: not measured yet

    def choose(self, num_decoding: int) -> int:
        """Return the number of prompt positions to read beside as many decoding rows."""
        size = FIRST_CHUNK
        if self.position_seconds:
            shared = max(STEP_SECONDS - self.decode_seconds, MIN_PROMPT_SHARE * self.decode_seconds)
            seconds = shared if num_decoding else PREFILL_SECONDS
            size = max(MIN_CHUNK, min(int(seconds / self.position_seconds), MAX_GROWTH * self.last_size))
        self.chosen_size = min(size, self.max_size)
        return self.chosen_size

    def record(self, seconds: float, num_decoding: int, num_positions: int) -> None:
        """Take account of the time of a step."""
        if not num_positions:
            self.decode_seconds += WEIGHT * (seconds - self.decode_seconds) if self.decode_seconds else seconds
            return
        if num_decoding:
            self.decode_seconds = min(self.decode_seconds, seconds)  # rows may have left since it was measured
        if self.position_seconds and 2 * num_positions < self.chosen_size:
            return  # the end of a prompt or a few latents, which do not tell what a long chunk costs
        prompt_seconds = seconds - (self.decode_seconds if num_decoding else 0)
        per_position = max(prompt_seconds, LEAST_SECONDS) / num_positions
        before = self.position_seconds or per_position
        self.position_seconds, self.last_size = before + WEIGHT * (per_position - before), num_positions


def share_positions(remaining: Sequence[int], size: int) -> list[int]:
    """Share `size` positions out to prompts with so many remaining ones, evenly but for what short prompts leave."""
    shares, left = [0] * len(remaining), size
    order = sorted(range(len(remaining)), key=lambda i: remaining[i])
    for rank, i in enumerate(order):
        shares[i] = min(remaining[i], -(-left // (len(order) - rank)))
        left -= shares[i]
    return shares
