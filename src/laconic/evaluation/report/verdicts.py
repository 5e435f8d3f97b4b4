"""Verdicts on figures of papers: whether the confidence intervals of runs reproduce them."""

from collections.abc import Iterable

NOT_RUN, REPRODUCED, NOT_REPRODUCED = "not run", "reproduced", "not reproduced"
TOO_WIDE, FIGURE_ONLY = "interval too wide to tell", "figure only"
MAX_RELATIVE_WIDTH = 0.05  # of the figure; a 95 % interval that reaches further to one side decides nothing


def worst_verdict(verdicts: Iterable[str]) -> str:
    """Return the worst verdict on the figures of a row."""
    distinct = set(verdicts)
    return next((verdict for verdict in (NOT_REPRODUCED, TOO_WIDE, REPRODUCED) if verdict in distinct), NOT_RUN)


def judge_at_least(figure: float, low: float, high: float) -> str:
    """Return whether an interval reaches a figure, where more is better."""
    if high < figure:
        return NOT_REPRODUCED
    return REPRODUCED if low >= (1 - MAX_RELATIVE_WIDTH) * figure else TOO_WIDE


def judge_equal(figure: float, low: float, high: float, rounding: float = 0.0) -> str:
    """Return whether an interval contains a figure that was rounded by at most `rounding`."""
    if not low - rounding <= figure <= high + rounding:
        return NOT_REPRODUCED
    return REPRODUCED if high - low <= 2 * MAX_RELATIVE_WIDTH * abs(figure) else TOO_WIDE
