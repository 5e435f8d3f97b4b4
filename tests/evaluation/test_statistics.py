"""Intervals against closed forms, Holm against worked cases, and how often equal runs give a claim."""

import math
from itertools import product
from statistics import NormalDist

import numpy as np
import pytest

from laconic import rng
from laconic.evaluation import statistics

CLAIMS = 0.08  # share of comparisons of equal distributions that may end in a claim; nominal 5 %


def binomial_quantile(n: int, p: float, q: float) -> int:
    """The least k whose distribution function is at least q, summed term by term."""
    total = 0.0
    for k in range(n + 1):
        total += math.exp(
            math.lgamma(n + 1)
            - math.lgamma(k + 1)
            - math.lgamma(n - k + 1)
            + k * math.log(p)
            + (n - k) * math.log1p(-p)
        )
        if total >= q:
            return k
    return n


@pytest.mark.medium
@pytest.mark.parametrize(("right", "n"), [(30, 50), (180, 1000), (1960, 2000)])
def test_estimate_proportion_of_one_run_is_binomial(right: int, n: int) -> None:
    """The bootstrap of a share of right answers is the binomial distribution itself."""
    scores = np.arange(n) < right
    result = statistics.estimate_mean(scores)
    low, high = (binomial_quantile(n, right / n, q) / n for q in (0.025, 0.975))
    slack = (
        4 * math.sqrt(0.025 * 0.975 / statistics.NUM_RESAMPLES) / NormalDist().pdf(1.96)
    )  # of the quantile of 10,000 draws
    width = math.sqrt(right / n * (1 - right / n) / n)
    assert abs(result.low - low) <= slack * width + 1 / n
    assert abs(result.high - high) <= slack * width + 1 / n
    assert (result.mean, result.sd, result.num_seeds, result.num_items) == (right / n, None, 1, n)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),  # bounds of scipy.stats.binomtest
    [
        (3, 20, 0.03207094, 0.3789268),
        (17, 20, 0.6210732, 0.9679291),
        (0, 10, 0.0, 0.3084971),
        (9, 200, 0.0207804, 0.0837027),
    ],
)
def test_estimate_proportion_of_few_right_or_wrong_answers_is_exact(
    right: int, n: int, low: float, high: float
) -> None:
    result = statistics.estimate_proportion(np.arange(n) < right)
    assert (result.low, result.high) == pytest.approx((low, high), abs=1e-6)
    assert result.mean == right / n


def test_estimate_mean_over_seeds_only() -> None:
    """Every question alike: what is left are the means of draws of three seeds, listed here one by one."""
    means = np.array([0.2, 0.5, 0.8])
    result = statistics.estimate_mean(np.repeat(means[:, None], 10, axis=1))
    stretch = math.sqrt(3 / 2) * 4.302653 / 1.959964
    every = sorted(0.5 + stretch * (means[list(three)].mean() - 0.5) for three in product(range(3), repeat=3))
    assert (result.low, result.high) == (pytest.approx(every[0], abs=1e-6), pytest.approx(every[-1], abs=1e-6))
    assert result.sd == pytest.approx(0.3)


def test_bootstrap_means_are_reproducible() -> None:
    scores = rng.uniform(1, np.arange(3)[:, None], np.arange(50)[None]) < 0.4
    assert statistics.estimate_mean(scores) == statistics.estimate_mean(scores.copy())
    golden = statistics.estimate_mean(np.arange(50) < 30)
    assert (golden.low, golden.high) == (pytest.approx(0.46), pytest.approx(0.74))


def equal_runs(trial: int, R: int, N: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Two methods that are one: each seed has an accuracy of its own, each question a difficulty of its own."""
    hard = rng.uniform(7, trial, np.arange(N)) - 0.5
    built = []
    for method in range(2):
        shift = spread * np.array([NormalDist().inv_cdf(u) for u in rng.uniform(8, trial, method, np.arange(R))])
        draws = rng.uniform(9, trial, method, np.arange(R)[:, None], np.arange(N)[None])
        built.append(draws < 0.5 + 0.6 * hard[None] + shift[:, None])
    return built[0], built[1]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("R", "spread"),
    [(1, 0.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 0.0), (3, 0.03), (5, 0.1))), (3, 0.15)],
)
def test_find_significant_rarely_errs_for_equal_distributions(R: int, spread: float) -> None:
    trials = 400
    claims = 0
    for trial in range(trials):
        result = statistics.paired_difference(*equal_runs(trial, R, 60, spread))
        claims += statistics.find_significant([result])[0]
    assert claims <= CLAIMS * trials, f"{claims} of {trials}"


def test_find_significant_finds_a_real_difference() -> None:
    a, b = equal_runs(0, 3, 500, 0.01)
    result = statistics.paired_difference(np.minimum(a + (np.arange(500) % 3 == 0), 1), b)
    assert statistics.find_significant([result]) == [True]
    assert statistics.describe_difference(result, True).startswith(
        f"+{100 * result.mean:.1f} points (3 seeds, interval +"
    )
    nothing = statistics.paired_difference(a, a)
    assert (nothing.mean, nothing.low, nothing.high, nothing.p) == (0, 0, 0, 1)
    assert statistics.describe_difference(nothing, False) == "no difference shown (3 seeds, interval +0.0 to +0.0)"


@pytest.mark.medium
def test_estimate_proportion_stays_inside_and_has_a_width() -> None:
    """All of n right: the least share that gives this in 2.5 of 100 tries is its n-th root."""
    whole = statistics.estimate_proportion(np.ones((3, 2000)))
    assert (whole.low, whole.high) == (pytest.approx(0.025 ** (1 / 2000)), 1.0)
    assert statistics.estimate_proportion(np.zeros(10)).high == pytest.approx(1 - 0.025 ** (1 / 10))
    near = np.ones((3, 100))
    near[0, :9] = 0
    assert statistics.estimate_mean(near).high > 1 == statistics.estimate_proportion(near).high


def test_format_points_has_no_negative_zero() -> None:
    assert [statistics.format_points(x) for x in (-0.0004, 0.0123, -0.5)] == ["+0.0", "+1.2", "-50.0"]


def test_holm_adjust_as_in_the_paper() -> None:
    assert statistics.holm_adjust([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm_adjust([]) == []
    assert statistics.holm_adjust([0.6, 0.9]) == [1.0, 1.0]


def test_find_significant_applies_holm() -> None:
    one = statistics.Difference(0.1, 0.01, 0.2, 0.03, 3, 100)
    assert statistics.find_significant([one]) == [True]
    assert statistics.find_significant([one, one._replace(p=0.04)]) == [False, False]
    assert statistics.find_significant([one._replace(low=-0.01, p=0.001)]) == [False]
    results = statistics.describe_difference(one, False)
    assert results == "no difference shown after Holm's correction (3 seeds, interval +1.0 to +20.0)"


def test_paired_difference_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="compare the same items"):
        statistics.paired_difference(np.ones((3, 4)), np.ones((2, 4)))
    for bad in ([], [math.nan], np.ones((2, 2, 2))):
        with pytest.raises(ValueError, match="finite scores"):
            statistics.to_matrix(bad)


def test_bootstrap_means_rounding_does_not_exclude_0() -> None:
    """One question of 31 that only A has right: in 36 of 100 resamples it is not drawn, and nothing differs."""
    for n in (31, 7, 77):
        for seeds in (1, 3):
            a, b = np.zeros((seeds, n)), np.zeros((seeds, n))
            a[:, 4] = 1
            result = statistics.paired_difference(a, b)
            assert result.low <= 0 <= result.high
            assert result.p > 0.5
            assert statistics.find_significant([result]) == [False]
