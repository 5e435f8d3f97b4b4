"""The word on a row of a paper: whether the runs at hand show its figures."""

from collections.abc import Iterable

NOT_RUN, REPRODUCED, NOT_REPRODUCED = "not run", "reproduced", "not reproduced"
TOO_WIDE, FIGURE_ONLY = "interval too wide to tell", "figure only"
MAX_RELATIVE_WIDTH = 0.05  # of a figure: an interval of 95 % that reaches further to a side tells nothing of it


def worst_verdict(verdicts: Iterable[str]) -> str:
    """The word on a row of whose figures each has one: the worst of them."""
    said = set(verdicts)
    return next((each for each in (NOT_REPRODUCED, TOO_WIDE, REPRODUCED) if each in said), NOT_RUN)


def judge_at_least(figure: float, low: float, high: float) -> str:
    """Whether an interval reaches a figure of which more is better, or lies above it."""
    if high < figure:
        return NOT_REPRODUCED
    return REPRODUCED if low >= (1 - MAX_RELATIVE_WIDTH) * figure else TOO_WIDE


def judge_equal(figure: float, low: float, high: float, rounding: float = 0.0) -> str:
    """Whether an interval holds a figure that was rounded by at most `rounding`."""
    if not low - rounding <= figure <= high + rounding:
        return NOT_REPRODUCED
    return REPRODUCED if high - low <= 2 * MAX_RELATIVE_WIDTH * abs(figure) else TOO_WIDE
