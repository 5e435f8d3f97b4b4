"""Choose where documents are cut into segments: fixed lengths, or random lengths drawn for each optimizer step.

AutoCompressors (arXiv:2305.14788 and its code at commit 80352a4). Symbols: W tokens in a window, w segments in it, X
positions available to a segment.
"""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from laconic.config.data import TextConfig
from laconic.errors import UsageError
from laconic.rng import uniform

CUT_KEY = 4  # separates these random numbers from a run's others
MAX_DRAWS, CHECK_DRAWS = 10_000, 300  # a limit that passes the check fails no later draw


def min_segment_length(W: int, w: int, X: int) -> int:
    """Return the minimum length in Eq. AC7, chosen so that no segment can exceed X tokens."""
    return max(-((X - W) // (w - 1)), 2)


def random_lengths(W: int, w: int, low: int, draws: NDArray[np.float64]) -> list[int]:
    """Eq. AC7: w random lengths of at least `low` that sum to W.

    `draws` are W - w low random numbers; the positions of the w - 1 smallest are the cut points.
    """
    rest = W - w * low
    cuts = np.sort(np.argpartition(draws, w - 2)[: w - 1]).tolist() if w > 1 else []
    return [low + b - a for a, b in zip([0, *cuts], [*cuts, rest], strict=True)]


class SegmentBoundaries:
    """The ends of segments, fixed or random; the same for all rows of a step.

    Random lengths are drawn for w consecutive segments (a window, if windows do not overlap), so that
    `config.segment_tokens` is their mean. `max_segment_tokens` is X. Raises `UsageError` if no lengths respect limits.
    """

    def __init__(self, config: TextConfig, seed: int, max_segment_tokens: int) -> None:
        self.config, self.seed = config, seed
        n = config.row_tokens // config.mean_segment_tokens
        self.groups = [min(config.segments_per_window, n - i) for i in range(0, n, config.segments_per_window)]
        self.max_length = config.max_segment_tokens or max(max_segment_tokens, 1)
        if config.segment_lengths == "random":
            self._check()

    @property
    def shortest_segment(self) -> int:
        is_fixed = self.config.segment_lengths == "fixed" or self.groups[0] == 1
        return self.fixed_ends()[0] if is_fixed else self.min_length(self.groups[0])

    def fixed_ends(self) -> tuple[int, ...]:
        tokens, segment = self.config.row_tokens, self.config.segment_tokens
        if isinstance(segment, tuple):
            return tuple(accumulate(segment))
        return tuple(min(end, tokens) for end in range(segment, tokens + segment, segment))

    def draw_ends(self, step: int) -> tuple[int, ...]:
        """Return the ends of segments at an optimizer step: random, or fixed if the recipe says so."""
        if self.config.segment_lengths == "fixed":
            return self.fixed_ends()
        return tuple(accumulate(length for i in range(len(self.groups)) for length in self.draw_lengths(step, i)))

    def draw_lengths(self, step: int, group: int, max_draws: int = MAX_DRAWS) -> list[int]:
        """Draw the lengths of a group until none exceeds the maximum. Raises `UsageError` after `max_draws` draws."""
        for attempt in range(max_draws):
            lengths = self.draw_once(step, group, attempt)
            if max(lengths) <= self.max_length:
                return lengths
        key = f"data.text.max_segment_tokens = {self.max_length}"
        raise UsageError(f"{key}: exceeded by all of {max_draws:,} draws; raise it")

    def draw_once(self, step: int, group: int, attempt: int) -> list[int]:
        """Draw the lengths of a group of segments, ignoring the maximum."""
        w = self.groups[group]
        W = w * self.config.mean_segment_tokens
        if w == 1:
            return [W]
        low = self.min_length(w)
        return random_lengths(W, w, low, uniform(self.seed, CUT_KEY, step, group, attempt, np.arange(W - w * low)))

    def min_length(self, w: int) -> int:
        W = w * self.config.mean_segment_tokens
        return self.config.min_segment_tokens or min_segment_length(W, w, self.max_length)

    def _check(self) -> None:
        for w in {*self.groups} - {1}:
            low = self.min_length(w)
            mean = self.config.mean_segment_tokens
            if w * (mean - low) < w - 1:
                raise UsageError(
                    f"data.text.segment_tokens = {mean}: lengths of {low} to {self.max_length} tokens leave nothing to "
                    f'draw for {w} segments; use shorter segments, or segment_lengths = "fixed"'
                )
            self.draw_lengths(0, self.groups.index(w), CHECK_DRAWS)
