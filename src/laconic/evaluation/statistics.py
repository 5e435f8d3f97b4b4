"""Means over seeds, bootstrap intervals over questions and seeds, and when a difference may be called one.

Runs stand in a matrix [R seeds, N questions] of what each question scored. The percentile bootstrap (Efron 1979) of
two or three seeds claims too much: where seeds differ most, equal means of three of them leave 0 out one time in three.
So the part of a draw that is due to seeds is stretched by sqrt(R/(R-1)) t/z (Hesterberg 2015,
doi:10.1080/00031305.2015.1089789).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from laconic import rng

NUM_RESAMPLES = 10_000
RNG_KEY = 20_261_121  # of every draw made here: the same runs give the same interval, anywhere
CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959964
ROUNDING_TOLERANCE = 1e-9  # what a draw may be off by rounding
# 97.5 % points of Student's t with 1, 2, … degrees of freedom; beyond ten seeds the last one is taken.
T_QUANTILES = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
ScoreMatrix = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean over seeds and questions, its standard deviation over seeds (n-1; None for one), its 95 % interval."""

    mean: float
    sd: float | None
    low: float
    high: float
    num_seeds: int
    num_items: int


class Difference(NamedTuple):
    """A minus B on the same questions and seeds: mean, 95 % interval, and the two-sided p of the same draws."""

    mean: float
    low: float
    high: float
    p: float
    num_seeds: int
    num_items: int


def to_matrix(scores: ArrayLike) -> ScoreMatrix:
    """[R, N] float64; one run may come as a row. Raises `ValueError` for what holds no score."""
    found = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if found.ndim != 2 or not found.size or not np.isfinite(found).all():
        raise ValueError(f"scores of shape {found.shape}: asked is a finite number for each seed and question")
    return found


@lru_cache(maxsize=8)
def resample_weights(n: int, draws: int, stream: int) -> NDArray[np.float32]:
    """How often each of `n` is drawn, less one: `draws` resamples with replacement, [draws, n]."""
    counts = np.empty((draws, n), dtype=np.float32)
    for start in range(0, draws, 1000):  # a thousand at a time: the indices are eight bytes each
        rows = np.arange(start, min(start + 1000, draws))
        at = (rng.uniform(RNG_KEY, stream, rows[:, None], np.arange(n)[None]) * n).astype(np.int64)
        flat = np.bincount((at + n * np.arange(len(rows))[:, None]).ravel(), minlength=n * len(rows))
        counts[rows] = flat.reshape(len(rows), n)
    return counts - 1


def bootstrap_means(scores: ScoreMatrix, draws: int = NUM_RESAMPLES, set_index: int = 0) -> ScoreMatrix:
    """The mean of each resample, seeds and questions drawn alike; the part of the seeds stretched for their number.

    Of several sets, numbered by `set`, each has its own draws of questions and all have the same draws of seeds.
    """
    R, N = scores.shape
    apart = (resample_weights(N, draws, 2 * set_index) @ scores.T.astype(np.float32)).astype(
        np.float64
    )  # of whole scores: no rounding
    found = (scores.sum() + apart.sum(1)) / (R * N)
    if R > 1:
        seeds = resample_weights(R, draws, 1)
        stretch = math.sqrt(R / (R - 1)) * T_QUANTILES[min(R - 1, len(T_QUANTILES)) - 1] / NORMAL_QUANTILE
        found += stretch * (seeds @ scores.mean(1) / R) + (seeds * apart).mean(1) / N
    return np.where(np.abs(found) < ROUNDING_TOLERANCE, 0.0, found)  # else rounding would leave 0 out of an interval


def percentile_interval(draws: ScoreMatrix) -> tuple[float, float]:
    """The middle 95 % of the draws."""
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def estimate_mean(scores: ArrayLike) -> Estimate:
    """Mean and spread of runs of one method."""
    held = to_matrix(scores)
    sd = float(held.mean(1).std(ddof=1)) if len(held) > 1 else None
    return Estimate(float(held.mean()), sd, *percentile_interval(bootstrap_means(held)), *held.shape)


def estimate_proportion(correct: ArrayLike) -> Estimate:
    """Accuracy: `estimate` of 0 and 1, inside [0, 1].

    Where all are right, or none, a bootstrap has no width: the bound of Clopper and Pearson (1934) stands in its place.
    """
    held = to_matrix(correct)
    found, bound = estimate_mean(held), ((1 - CONFIDENCE) / 2) ** (1 / held.shape[1])
    low = bound if found.mean == 1 else max(found.low, 0.0)
    return found._replace(low=low, high=1 - bound if found.mean == 0 else min(found.high, 1.0))


def paired_difference(a: ArrayLike, b: ArrayLike) -> Difference:
    """What A scores more than B, paired by seed and question."""
    first, second = to_matrix(a), to_matrix(b)
    if first.shape != second.shape:
        raise ValueError(f"runs of shapes {first.shape} and {second.shape}; compare the same questions and seeds")
    apart = first - second
    return difference_from_draws(float(apart.mean()), bootstrap_means(apart), *apart.shape)


def difference_from_draws(mean: float, draws: ScoreMatrix, seeds: int, questions: int) -> Difference:
    """A difference by its draws."""
    tail = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (len(draws) + 1))
    return Difference(mean, *percentile_interval(draws), p, seeds, questions)


def macro_average(per_set: Sequence[ArrayLike]) -> Estimate:
    """Accuracy as the plain mean over sets, runs of the same seeds on each; questions are resampled within a set.

    Where all are right, or none, the bounds are the mean of those of the sets.
    """
    held = [to_matrix(right) for right in per_set]
    by_seed = np.mean([scores.mean(1) for scores in held], axis=0)
    sd = float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None
    low, high = percentile_interval(mean_over_sets(held))
    if by_seed.mean() in (0, 1):
        low, high = np.mean([estimate_proportion(scores)[2:4] for scores in held], axis=0).tolist()
    questions = sum(scores.shape[1] for scores in held)
    return Estimate(float(by_seed.mean()), sd, max(low, 0.0), min(high, 1.0), len(by_seed), questions)


def macro_paired_difference(a: Sequence[ArrayLike], b: Sequence[ArrayLike]) -> Difference:
    """What A scores more than B in the plain mean over sets, paired by set, seed and question."""
    apart = [to_matrix(first) - to_matrix(second) for first, second in zip(a, b, strict=True)]
    mean = float(np.mean([scores.mean() for scores in apart]))
    return difference_from_draws(mean, mean_over_sets(apart), len(apart[0]), sum(scores.shape[1] for scores in apart))


def mean_over_sets(held: Sequence[ScoreMatrix]) -> ScoreMatrix:
    """The mean over sets of their resamples."""
    return np.mean([bootstrap_means(scores, set_index=i) for i, scores in enumerate(held)], axis=0)


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p for each of the comparisons in one table."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = least
    return adjusted


def find_significant(differences: Sequence[Difference]) -> list[bool]:
    """Whether each difference in a table may be called one: after Holm, and only if its interval leaves 0 out."""
    adjusted = holm_adjust([d.p for d in differences])
    return [
        p <= 1 - CONFIDENCE + 1e-12 and not d.low <= 0 <= d.high for d, p in zip(differences, adjusted, strict=True)
    ]


def describe_difference(difference: Difference, is_significant: bool) -> str:
    """A difference in words, in points of a hundred."""
    inside = f"n={difference.num_seeds}, interval {format_points(difference.low)} to {format_points(difference.high)}"
    if is_significant:
        return f"{format_points(difference.mean)} points ({inside})"
    corrected = "" if difference.low <= 0 <= difference.high else " after Holm's correction"
    return f"no difference shown{corrected} ({inside})"


def format_points(part: float) -> str:
    """A difference of shares in points of a hundred, with its sign, without a negative 0."""
    return f"{round(100 * part, 1) + 0.0:+.1f}"


def mcnemar_p_value(a: ArrayLike, b: ArrayLike) -> float:
    """Two-sided p of two single runs on the same questions (McNemar 1947): binomial, on what only one has right."""
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    only_a, only_b = int((first & ~second).sum()), int((second & ~first).sum())
    n = only_a + only_b
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(min(only_a, only_b) + 1)]
    return min(1.0, 2 * math.fsum(math.exp(log - n * math.log(2)) for log in logs))
