"""Compare right and wrong answers to the same questions: McNemar's test, an interval, and the detectable loss.

Of n questions, `losses` are answered correctly only before a change and `gains` only after it. McNemar's binomial test
(1947) uses these two counts alone, and keeps its level for few of them, where a bootstrap does not. The interval is the
adjusted Wald interval of Bonett and Price (2012), which keeps its level for few losses and gains, where a bootstrap
interval has no width. The detectable loss solves the sample size formula of Connor (1987) for the difference; without
gains it is a little larger than the test needs.
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from laconic.evaluation import statistics
from laconic.evaluation.statistics import CONFIDENCE, NORMAL_QUANTILE, Difference

POWER = 0.8


def compare_answers(changed: ArrayLike, original: ArrayLike) -> Difference:
    """Return the change of the accuracy, paired by seed and question, from scores [N] or [seeds, N] of 0 and 1.

    For one seed the p-value is that of McNemar's binomial test, and the interval Bonett and Price's; both are about
    this run. Several seeds are compared by `statistics.paired_difference`, which is about other seeds too, and so are
    scores other than 0 and 1.
    """
    after, before = statistics.to_matrix(changed), statistics.to_matrix(original)
    is_binary = bool(np.isin(after, (0, 1)).all() and np.isin(before, (0, 1)).all())
    if len(after) > 1 or not is_binary or after.shape != before.shape:
        return statistics.paired_difference(after, before)
    n, gains, losses = after.shape[1], int((after > before).sum()), int((after < before).sum())
    gain_share, loss_share = (gains + 1) / (n + 2), (losses + 1) / (n + 2)
    center = gain_share - loss_share
    half = NORMAL_QUANTILE * math.sqrt((gain_share + loss_share - center**2) / (n + 2))
    m, lgamma = gains + losses, math.lgamma
    logs = [lgamma(m + 1) - lgamma(k + 1) - lgamma(m - k + 1) for k in range(min(gains, losses) + 1)]
    p = min(1.0, 2 * math.fsum(math.exp(log - m * math.log(2)) for log in logs))
    return Difference((gains - losses) / n, max(center - half, -1.0), min(center + half, 1.0), p, 1, n)


def describe_test(num_seeds: int) -> str:
    """Return where the p-value of `compare_answers` comes from."""
    return "McNemar's binomial test" if num_seeds == 1 else "bootstrap over seeds and questions"


def min_questions(num_tests: int) -> int:
    """Return the fewest questions on which the loss of all answers is significant after Holm's correction."""
    return math.ceil(1 + math.log2(num_tests / (1 - CONFIDENCE)))


def power_quantiles(num_tests: int) -> tuple[float, float]:
    """Return the normal quantiles of Holm's strictest two-sided level, and of the power of four in five."""
    normal = NormalDist()
    return normal.inv_cdf(1 - (1 - CONFIDENCE) / num_tests / 2), normal.inv_cdf(POWER)


def detectable_loss(num_questions: int, num_tests: int, gain_share: float = 0.0) -> float:
    """Return a loss of accuracy that is significant in at least four of five audits, at Holm's strictest level.

    The audit has `num_tests` tests of n questions. `gain_share` is the share of questions that the change turns right
    by chance; as many are lost by chance.
    """
    z_level, z_power = power_quantiles(num_tests)

    def is_too_small(loss: float) -> bool:
        changed = loss + 2 * gain_share  # share of questions whose answer becomes right or wrong
        needed = z_level * math.sqrt(changed) + z_power * math.sqrt(max(changed - loss**2, 0.0))
        return loss * math.sqrt(num_questions) < needed

    return statistics.bisect_share(is_too_small)


def detectable_loss_over_seeds(change: Difference, num_tests: int) -> float:
    """Return the same for the mean over seeds, whose standard error the interval of a change gives."""
    error = (change.high - change.low) / (2 * NORMAL_QUANTILE)
    return min(1.0, sum(power_quantiles(num_tests)) * error)
