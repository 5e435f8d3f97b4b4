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

from laconic.core import keyed

DRAWS = 10_000
KEY = 20_261_121  # of every draw made here: the same runs give the same interval, anywhere
LEVEL = 0.95
Z = 1.959964
NOTHING = 1e-9  # what a draw may be off by rounding
# 97.5 % points of Student's t with 1, 2, … degrees of freedom; beyond ten seeds the last one is taken.
T = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
Scores = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean over seeds and questions, its standard deviation over seeds (n-1; None for one), its 95 % interval."""

    mean: float
    sd: float | None
    low: float
    high: float
    seeds: int
    questions: int


class Difference(NamedTuple):
    """A minus B on the same questions and seeds: mean, 95 % interval, and the two-sided p of the same draws."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int
    questions: int


def matrix(scores: ArrayLike) -> Scores:
    """[R, N] float64; one run may come as a row. Raises `ValueError` for what holds no score."""
    found = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if found.ndim != 2 or not found.size or not np.isfinite(found).all():
        raise ValueError(f"scores of shape {found.shape}: asked is a finite number for each seed and question")
    return found


@lru_cache(maxsize=8)
def weights(n: int, draws: int, purpose: int) -> NDArray[np.float32]:
    """How often each of `n` is drawn, less one: `draws` resamples with replacement, [draws, n]."""
    counts = np.empty((draws, n), dtype=np.float32)
    for start in range(0, draws, 1000):  # a thousand at a time: the indices are eight bytes each
        rows = np.arange(start, min(start + 1000, draws))
        at = (keyed.uniform(KEY, purpose, rows[:, None], np.arange(n)[None]) * n).astype(np.int64)
        flat = np.bincount((at + n * np.arange(len(rows))[:, None]).ravel(), minlength=n * len(rows))
        counts[rows] = flat.reshape(len(rows), n)
    return counts - 1


def resampled(scores: Scores, draws: int = DRAWS, set: int = 0) -> Scores:
    """The mean of each resample, seeds and questions drawn alike; the part of the seeds stretched for their number.

    Of several sets, numbered by `set`, each has its own draws of questions and all have the same draws of seeds.
    """
    R, N = scores.shape
    apart = (weights(N, draws, 2 * set) @ scores.T.astype(np.float32)).astype(
        np.float64
    )  # of whole scores: no rounding
    found = (scores.sum() + apart.sum(1)) / (R * N)
    if R > 1:
        seeds = weights(R, draws, 1)
        stretch = math.sqrt(R / (R - 1)) * T[min(R - 1, len(T)) - 1] / Z
        found += stretch * (seeds @ scores.mean(1) / R) + (seeds * apart).mean(1) / N
    return np.where(np.abs(found) < NOTHING, 0.0, found)  # else rounding would leave 0 out of an interval


def interval(draws: Scores) -> tuple[float, float]:
    """The middle 95 % of the draws."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def estimate(scores: ArrayLike) -> Estimate:
    """Mean and spread of runs of one method."""
    held = matrix(scores)
    sd = float(held.mean(1).std(ddof=1)) if len(held) > 1 else None
    return Estimate(float(held.mean()), sd, *interval(resampled(held)), *held.shape)


def share(right: ArrayLike) -> Estimate:
    """Accuracy: `estimate` of 0 and 1, inside [0, 1].

    Where all are right, or none, a bootstrap has no width: the bound of Clopper and Pearson (1934) stands in its place.
    """
    held = matrix(right)
    found, bound = estimate(held), ((1 - LEVEL) / 2) ** (1 / held.shape[1])
    low = bound if found.mean == 1 else max(found.low, 0.0)
    return found._replace(low=low, high=1 - bound if found.mean == 0 else min(found.high, 1.0))


def difference(a: ArrayLike, b: ArrayLike) -> Difference:
    """What A scores more than B, paired by seed and question."""
    first, second = matrix(a), matrix(b)
    if first.shape != second.shape:
        raise ValueError(f"runs of shapes {first.shape} and {second.shape}; compare the same questions and seeds")
    apart = first - second
    return judged(float(apart.mean()), resampled(apart), *apart.shape)


def judged(mean: float, draws: Scores, seeds: int, questions: int) -> Difference:
    """A difference by its draws."""
    tail = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (len(draws) + 1))
    return Difference(mean, *interval(draws), p, seeds, questions)


def macro(rights: Sequence[ArrayLike]) -> Estimate:
    """Accuracy as the plain mean over sets, runs of the same seeds on each; questions are resampled within a set.

    Where all are right, or none, the bounds are the mean of those of the sets.
    """
    held = [matrix(right) for right in rights]
    by_seed = np.mean([scores.mean(1) for scores in held], axis=0)
    sd = float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None
    low, high = interval(mean_draws(held))
    if by_seed.mean() in (0, 1):
        low, high = np.mean([share(scores)[2:4] for scores in held], axis=0).tolist()
    questions = sum(scores.shape[1] for scores in held)
    return Estimate(float(by_seed.mean()), sd, max(low, 0.0), min(high, 1.0), len(by_seed), questions)


def macro_difference(a: Sequence[ArrayLike], b: Sequence[ArrayLike]) -> Difference:
    """What A scores more than B in the plain mean over sets, paired by set, seed and question."""
    apart = [matrix(first) - matrix(second) for first, second in zip(a, b, strict=True)]
    mean = float(np.mean([scores.mean() for scores in apart]))
    return judged(mean, mean_draws(apart), len(apart[0]), sum(scores.shape[1] for scores in apart))


def mean_draws(held: Sequence[Scores]) -> Scores:
    """The mean over sets of their resamples."""
    return np.mean([resampled(scores, set=i) for i, scores in enumerate(held)], axis=0)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p for each of the comparisons in one table."""
    adjusted, least = [0.0] * len(ps), 0.0
    for place, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = least
    return adjusted


def shown(found: Sequence[Difference]) -> list[bool]:
    """Whether each difference in a table may be called one: after Holm, and only if its interval leaves 0 out."""
    adjusted = holm([d.p for d in found])
    return [p <= 1 - LEVEL + 1e-12 and not d.low <= 0 <= d.high for d, p in zip(found, adjusted, strict=True)]


def sentence(found: Difference, claim: bool) -> str:
    """A difference in words, in points of a hundred."""
    inside = f"n={found.seeds}, interval {points(found.low)} to {points(found.high)}"
    if claim:
        return f"{points(found.mean)} points ({inside})"
    corrected = "" if found.low <= 0 <= found.high else " after Holm's correction"
    return f"no difference shown{corrected} ({inside})"


def points(part: float) -> str:
    """A difference of shares in points of a hundred, with its sign, without a negative 0."""
    return f"{round(100 * part, 1) + 0.0:+.1f}"


def mcnemar(a: ArrayLike, b: ArrayLike) -> float:
    """Two-sided p of two single runs on the same questions (McNemar 1947): binomial, on what only one has right."""
    first, second = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    only_a, only_b = int((first & ~second).sum()), int((second & ~first).sum())
    n = only_a + only_b
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(min(only_a, only_b) + 1)]
    return min(1.0, 2 * math.fsum(math.exp(log - n * math.log(2)) for log in logs))
