"""Where documents are cut into segments: at lengths that are given, or drawn for each optimizer step.

AutoCompressors (arXiv:2305.14788 and its code at 80352a4): W tokens of a window, w segments in it, X usable positions.
"""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from laconic.core.errors import Usage
from laconic.core.keyed import uniform
from laconic.data.settings import Text

CUTS = 4  # key of the draws
TRIES, TRIED, FEW = 10_000, 300, 3  # draws before none is found; of so many at the start, so many have to fit


def least(W: int, w: int, X: int) -> int:
    """The shortest length that AC7 draws: the others are then X at most."""
    return max(-((X - W) // (w - 1)), 2)


def random_lengths(W: int, w: int, low: int, draws: NDArray[np.float64]) -> list[int]:
    """Eq. AC7: w lengths that sum to W, by w - 1 distinct cut points among W - w low, where the smallest draws are."""
    rest = W - w * low
    cuts = np.sort(np.argpartition(draws, w - 2)[: w - 1]).tolist() if w > 1 else []
    return [low + b - a for a, b in zip([0, *cuts], [*cuts, rest], strict=True)]


class Cuts:
    """The ends of the segments of rows: `fixed()`, or drawn for a step, the same for all rows of it.

    Lengths are drawn for each w segments that follow one another (a window, where windows do not overlap), so that
    `segment` is their mean. `room` is X. Raises `Usage` (2) where hardly any draw keeps between low and high.
    """

    def __init__(self, how: Text, seed: int, room: int) -> None:
        self.how, self.seed = how, seed
        n = how.tokens // how.mean
        self.groups = [min(how.window, n - i) for i in range(0, n, how.window)]
        self.high = how.high or max(room, 1)
        if how.segments == "random":
            self._check()

    def fixed(self) -> tuple[int, ...]:
        """As `segment` says, up to `tokens`."""
        tokens, segment = self.how.tokens, self.how.segment
        if isinstance(segment, tuple):
            return tuple(accumulate(segment))
        return tuple(min(end, tokens) for end in range(segment, tokens + segment, segment))

    def drawn(self, step: int) -> tuple[int, ...]:
        """Those of an optimizer step; fixed ones where nothing is drawn."""
        if self.how.segments == "fixed":
            return self.fixed()
        return tuple(accumulate(length for group in range(len(self.groups)) for length in self.lengths(step, group)))

    def lengths(self, step: int, group: int) -> list[int]:
        """The lengths of some segments that follow one another, drawn again until none is over high."""
        for attempt in range(TRIES):
            found = self.attempt(step, group, attempt)
            if max(found) <= self.high:
                return found
        raise Usage(f"data.text.high {self.high}: none of {TRIES:,} draws keeps to it; raise it, or lower segment")

    def attempt(self, step: int, group: int, attempt: int) -> list[int]:
        """One draw."""
        w = self.groups[group]
        W = w * self.how.mean
        if w == 1:
            return [W]
        low = self.low(w)
        return random_lengths(W, w, low, uniform(self.seed, CUTS, step, group, attempt, np.arange(W - w * low)))

    def low(self, w: int) -> int:
        """The shortest length of w segments."""
        return self.how.low or least(w * self.how.mean, w, self.high)

    def _check(self) -> None:
        for w in {*self.groups} - {1}:
            low, mean = self.low(w), self.how.mean
            if w * (mean - low) < w - 1:
                raise Usage(
                    f"data.text.segment {mean}: from {low} to {self.high} tokens nothing is left to draw for {w} "
                    'segments; take shorter ones, or segments = "fixed"'
                )
            if self.how.low is None:
                continue  # AC7's own bound keeps every length to high
            group = self.groups.index(w)
            fit = sum(max(self.attempt(0, group, attempt)) <= self.high for attempt in range(TRIED))
            if fit < FEW:
                raise Usage(
                    f"data.text.high {self.high}: {fit} of {TRIED} draws from low {low} keep to it; raise it, or low"
                )
