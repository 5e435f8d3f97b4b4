"""Means over seeds, bootstrap intervals over items and seeds, and significance of paired differences.

Scores are a matrix [R seeds, N items]. The percentile bootstrap (Efron 1979) of two or three seeds gives intervals that
are too narrow: in the worst case, the interval of equal means over three seeds excludes 0 one time in three. The part
of a resample that is due to seeds is therefore stretched by sqrt(R/(R-1)) t/z (Hesterberg 2015,
doi:10.1080/00031305.2015.1089789).

Of n right and wrong answers before and after a change, `losses` are right only before it and `gains` only after it.
McNemar's binomial test (1947) uses these two counts alone, and keeps its level for few of them, where a bootstrap does
not. The interval is the adjusted Wald interval of Bonett and Price (2012), which keeps its level for few losses and
gains, where a bootstrap interval has no width. The detectable loss solves the sample size formula of Connor (1987) for
the difference; without gains it is a little larger than the test needs.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from laconic import rng
from laconic.console import pluralize

NUM_RESAMPLES = 10_000
RNG_KEY = 20_261_121  # the same scores give the same interval on every machine
CONFIDENCE, POWER = 0.95, 0.8
NORMAL_QUANTILE = float(special.ndtri((1 + CONFIDENCE) / 2))
ROUNDING_TOLERANCE = 1e-9
FEW_ANSWERS = 10  # with fewer right or fewer wrong answers of one run, the interval is Clopper and Pearson's
ScoreMatrix = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean over seeds and items with its 95 % interval; `sd` is over seeds (n-1), None for a single seed."""

    mean: float
    sd: float | None
    low: float
    high: float
    num_seeds: int
    num_items: int


class Difference(NamedTuple):
    """A minus B on the same items and seeds: mean, 95 % interval, and two-sided p from the same resamples."""

    mean: float
    low: float
    high: float
    p: float
    num_seeds: int
    num_items: int


def to_matrix(scores: ArrayLike) -> ScoreMatrix:
    """Return scores as [R, N] float64; a single row is one seed. `ValueError` for anything but finite scores."""
    matrix = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if matrix.ndim != 2 or not matrix.size or not np.isfinite(matrix).all():
        raise ValueError(f"expected finite scores of shape [seeds, items], got shape {matrix.shape}")
    return matrix


@lru_cache(maxsize=8)
def resample_weights(n: int, stream: int) -> NDArray[np.float32]:
    """Return how often each of `n` is drawn minus 1, for every resample with replacement: [NUM_RESAMPLES, n]."""
    counts = np.empty((NUM_RESAMPLES, n), dtype=np.float32)
    for start in range(0, NUM_RESAMPLES, 1000):  # in parts, since an index takes eight bytes
        rows = np.arange(start, start + 1000)
        at = (rng.uniform(RNG_KEY, stream, rows[:, None], np.arange(n)[None]) * n).astype(np.int64)
        flat = np.bincount((at + n * np.arange(len(rows))[:, None]).ravel(), minlength=n * len(rows))
        counts[rows] = flat.reshape(len(rows), n)
    return counts - 1


def bootstrap_means(scores: ScoreMatrix) -> ScoreMatrix:
    """Return the mean of each resample of seeds and items, the part of the seeds stretched for their number."""
    R, N = scores.shape
    sums = resample_weights(N, 0) @ scores.T.astype(np.float32)  # of scores 0 and 1: whole numbers in float32
    deviations = sums.astype(np.float64)
    means = (scores.sum() + deviations.sum(1)) / (R * N)
    if R > 1:
        seeds = resample_weights(R, 1)
        stretch = math.sqrt(R / (R - 1)) * special.stdtrit(R - 1, (1 + CONFIDENCE) / 2) / NORMAL_QUANTILE
        means += stretch * (seeds @ scores.mean(1) / R) + (seeds * deviations).mean(1) / N
    return np.where(np.abs(means) < ROUNDING_TOLERANCE, 0.0, means)  # else rounding could exclude 0 from an interval


def percentile_interval(draws: ScoreMatrix) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def estimate_mean(scores: ArrayLike) -> Estimate:
    matrix = to_matrix(scores)
    sd = float(matrix.mean(1).std(ddof=1)) if len(matrix) > 1 else None
    return Estimate(float(matrix.mean()), sd, *percentile_interval(bootstrap_means(matrix)), *matrix.shape)


def estimate_proportion(correct: ArrayLike) -> Estimate:
    """Return the mean of scores of 0 and 1, with an interval inside [0, 1].

    A bootstrap is too coarse for few right or few wrong answers: with 3 of 20, its interval contains 0. The interval of
    Clopper and Pearson (1934) is used for them if there is one seed, and for several if all answers are alike.
    """
    matrix = to_matrix(correct)
    estimate, (R, N) = estimate_mean(matrix), matrix.shape
    is_binary = R == 1 and bool(np.isin(matrix, (0, 1)).all())
    num_fewer = min(matrix.sum(), matrix.size - matrix.sum())
    if num_fewer == 0 or (is_binary and num_fewer < FEW_ANSWERS):
        low, high = clopper_pearson_interval(round(float(estimate.mean) * N), N)
        return estimate._replace(low=low, high=high)
    return estimate._replace(low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))


def clopper_pearson_interval(k: int, n: int) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a share, from `k` of `n` trials."""
    tail = (1 - CONFIDENCE) / 2
    low = special.betaincinv(k, n - k + 1, tail) if k else 0.0
    high = special.betaincinv(k + 1, n - k, 1 - tail) if k < n else 1.0
    return float(low), float(high)


def paired_difference(a: ArrayLike, b: ArrayLike) -> Difference:
    """Return A minus B, paired by seed and item, by the bootstrap. `ValueError` for scores of different shapes.

    Its p is too small if few of the items of one seed differ; `compare_answers` has the binomial p
    of scores of 0 and 1.
    """
    first, second = to_matrix(a), to_matrix(b)
    if first.shape != second.shape:
        raise ValueError(f"scores of shapes {first.shape} and {second.shape}; compare the same items and seeds")
    scores = first - second
    draws = bootstrap_means(scores)
    tail = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    p = min(1.0, 2 * (tail + 1) / (len(draws) + 1))
    return Difference(float(scores.mean()), *percentile_interval(draws), p, *scores.shape)


def compare_answers(changed: ArrayLike, original: ArrayLike) -> Difference:
    """Return the change of the accuracy, paired by seed and question, from scores [N] or [seeds, N] of 0 and 1.

    For one seed the p-value is that of McNemar's binomial test, and the interval Bonett and Price's; both are about
    this run. Several seeds are compared by `paired_difference`, which is about other seeds too, and so are
    scores other than 0 and 1.
    """
    after, before = to_matrix(changed), to_matrix(original)
    is_binary = bool(np.isin(after, (0, 1)).all() and np.isin(before, (0, 1)).all())
    if len(after) > 1 or not is_binary or after.shape != before.shape:
        return paired_difference(after, before)
    n = after.shape[1]
    gains = int((after > before).sum())
    losses = int((after < before).sum())
    gain_share, loss_share = (gains + 1) / (n + 2), (losses + 1) / (n + 2)
    center = gain_share - loss_share
    half = NORMAL_QUANTILE * math.sqrt((gain_share + loss_share - center**2) / (n + 2))
    p = min(1.0, 2 * float(special.bdtr(min(gains, losses), gains + losses, 0.5)))
    return Difference(
        mean=(gains - losses) / n,
        low=max(center - half, -1.0),
        high=min(center + half, 1.0),
        p=p,
        num_seeds=1,
        num_items=n,
    )


def describe_test(num_seeds: int) -> str:
    """Return where the p-value of `compare_answers` comes from."""
    return "McNemar's binomial test" if num_seeds == 1 else "bootstrap over seeds and questions"


def min_questions(num_tests: int) -> int:
    """Return the fewest questions on which the loss of all answers is significant after Holm's correction."""
    return math.ceil(1 + math.log2(num_tests / (1 - CONFIDENCE)))


def power_quantiles(num_tests: int) -> tuple[float, float]:
    """Return the normal quantiles of Holm's strictest two-sided level, and of the power of four in five."""
    return float(special.ndtri(1 - (1 - CONFIDENCE) / num_tests / 2)), float(special.ndtri(POWER))


def detectable_loss(num_questions: int, num_tests: int, gain_share: float = 0.0) -> float:
    """Return a loss of accuracy that is significant in at least four of five audits, at Holm's strictest level.

    The audit has `num_tests` tests of n questions. `gain_share` is the share of questions that the change turns right
    by chance; as many are lost by chance.
    """
    z_level, z_power = power_quantiles(num_tests)

    def margin(loss: float) -> float:
        changed = loss + 2 * gain_share  # share of questions whose answer becomes right or wrong
        needed = z_level * math.sqrt(changed) + z_power * math.sqrt(max(changed - loss**2, 0.0))
        return loss * math.sqrt(num_questions) - needed

    return cast(float, optimize.brentq(margin, 1e-9, 1.0)) if margin(1.0) > 0 else 1.0


def detectable_loss_over_seeds(change: Difference, num_tests: int) -> float:
    """Return the same for the mean over seeds, whose standard error the interval of a change gives."""
    error = (change.high - change.low) / (2 * NORMAL_QUANTILE)
    return min(1.0, sum(power_quantiles(num_tests)) * error)


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    p = np.array(p_values)
    order = p.argsort(kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(p[order] * range(len(p), 0, -1)).clip(max=1.0)
    return adjusted.tolist()


def find_significant(differences: Sequence[Difference]) -> list[bool]:
    """Return which differences are significant: after Holm's correction, and with an interval that excludes 0."""
    adjusted = holm_adjust([d.p for d in differences])
    return [
        p <= 1 - CONFIDENCE + 1e-12 and not d.low <= 0 <= d.high for d, p in zip(differences, adjusted, strict=True)
    ]


def describe_difference(difference: Difference, is_significant: bool) -> str:
    """Return a difference of shares as text, in percentage points.

    If it is not significant although the interval excludes 0, the text says why.
    """
    interval = f"interval {format_points(difference.low)} to {format_points(difference.high)}"
    inside = f"{pluralize(difference.num_seeds, 'seed')}, {interval}"
    if is_significant:
        return f"{format_points(difference.mean)} points ({inside})"
    if difference.low <= 0 <= difference.high:
        return f"no difference shown ({inside})"
    if difference.p > 1 - CONFIDENCE:
        return f"no difference shown ({inside}, p {difference.p:.3f})"
    return f"no difference shown after Holm's correction ({inside})"


def format_difference(difference: Difference) -> str:
    """Format a difference of shares in percentage points, with its interval."""
    mean, low, high = (format_points(x) for x in difference[:3])
    return f"{mean} ({low} to {high})"


def format_points(part: float) -> str:
    return f"{100 * part:+z.1f}"
