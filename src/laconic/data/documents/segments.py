"""Where documents are cut into segments: at lengths that are given, or drawn for each optimizer step.

AutoCompressors (arXiv:2305.14788 and its code at 80352a4): W tokens of a window, w segments in it, X usable positions.
"""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from laconic.config.data import TextConfig
from laconic.errors import UsageError
from laconic.rng import uniform

CUT_KEY = 4  # key of the draws
MAX_DRAWS, CHECK_DRAWS, MIN_ACCEPTED = (
    10_000,
    300,
    3,
)  # draws before none is found; of so many at the start, so many have to fit


def min_segment_length(W: int, w: int, X: int) -> int:
    """The shortest length that AC7 draws: the others are then X at most."""
    return max(-((X - W) // (w - 1)), 2)


def random_lengths(W: int, w: int, low: int, draws: NDArray[np.float64]) -> list[int]:
    """Eq. AC7: w lengths that sum to W, by w - 1 distinct cut points among W - w low, where the smallest draws are."""
    rest = W - w * low
    cuts = np.sort(np.argpartition(draws, w - 2)[: w - 1]).tolist() if w > 1 else []
    return [low + b - a for a, b in zip([0, *cuts], [*cuts, rest], strict=True)]


class SegmentBoundaries:
    """The ends of the segments of rows: `fixed()`, or drawn for a step, the same for all rows of it.

    Lengths are drawn for each w segments that follow one another (a window, where windows do not overlap), so that
    `segment` is their mean. `room` is X. Raises `Usage` (2) where hardly any draw keeps between low and high.
    """

    def __init__(self, config: TextConfig, seed: int, max_segment_tokens: int) -> None:
        self.config, self.seed = config, seed
        n = config.row_tokens // config.mean_segment_tokens
        self.groups = [min(config.segments_per_window, n - i) for i in range(0, n, config.segments_per_window)]
        self.max_length = config.max_segment_tokens or max(max_segment_tokens, 1)
        if config.segment_lengths == "random":
            self._check()

    def fixed_ends(self) -> tuple[int, ...]:
        """As `segment` says, up to `tokens`."""
        tokens, segment = self.config.row_tokens, self.config.segment_tokens
        if isinstance(segment, tuple):
            return tuple(accumulate(segment))
        return tuple(min(end, tokens) for end in range(segment, tokens + segment, segment))

    def random_ends(self, step: int) -> tuple[int, ...]:
        """Those of an optimizer step; fixed ones where nothing is drawn."""
        if self.config.segment_lengths == "fixed":
            return self.fixed_ends()
        return tuple(
            accumulate(length for group in range(len(self.groups)) for length in self.draw_lengths(step, group))
        )

    def draw_lengths(self, step: int, group: int) -> list[int]:
        """The lengths of some segments that follow one another, drawn again until none is over high."""
        for attempt in range(MAX_DRAWS):
            found = self.draw_once(step, group, attempt)
            if max(found) <= self.max_length:
                return found
        raise UsageError(
            f"data.text.max_segment_tokens {self.max_length}: none of {MAX_DRAWS:,} draws keeps to it; raise it, or lower segment"
        )

    def draw_once(self, step: int, group: int, attempt: int) -> list[int]:
        """One draw."""
        w = self.groups[group]
        W = w * self.config.mean_segment_tokens
        if w == 1:
            return [W]
        low = self.min_length(w)
        return random_lengths(W, w, low, uniform(self.seed, CUT_KEY, step, group, attempt, np.arange(W - w * low)))

    def min_length(self, w: int) -> int:
        """The shortest length of w segments."""
        return self.config.min_segment_tokens or min_segment_length(
            w * self.config.mean_segment_tokens, w, self.max_length
        )

    def _check(self) -> None:
        for w in {*self.groups} - {1}:
            low, mean = self.min_length(w), self.config.mean_segment_tokens
            if w * (mean - low) < w - 1:
                raise UsageError(
                    f"data.text.segment_tokens {mean}: from {low} to {self.max_length} tokens nothing is left to draw for {w} "
                    'segments; take shorter ones, or segments = "fixed"'
                )
            if self.config.min_segment_tokens is None:
                continue  # AC7's own bound keeps every length to high
            group = self.groups.index(w)
            fit = sum(max(self.draw_once(0, group, attempt)) <= self.max_length for attempt in range(CHECK_DRAWS))
            if fit < MIN_ACCEPTED:
                raise UsageError(
                    f"data.text.max_segment_tokens {self.max_length}: {fit} of {CHECK_DRAWS} draws from low {low} keep to it; raise it, or low"
                )
