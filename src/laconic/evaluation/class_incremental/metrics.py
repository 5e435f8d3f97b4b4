"""Forgetting in figures: average accuracy, backward transfer, forgetting and plasticity of a stream of tasks.

A[i, j] is the accuracy on task j after task i, i and j from 0 to n - 1, j <= i. Lopez-Paz and Ranzato 2017
(arXiv:1706.08840) have the backward transfer, Chaudhry et al. 2018 (arXiv:1801.10112) forgetting.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from laconic.evaluation import statistics
from laconic.evaluation.statistics import Estimate

AccuracyRows = Sequence[Sequence[float | None]]
METRIC_NAMES = ("AA", "BWT", "forgetting", "plasticity")


class ForgettingMetrics(NamedTuple):
    """Of one order; None where A has only its last row, or one task."""

    AA: float
    BWT: float | None
    forgetting: float | None
    plasticity: float | None


def compute_metrics(A: AccuracyRows) -> ForgettingMetrics:
    """The figures of a matrix. Raises `ValueError` for one whose last row is not whole."""
    n = len(A)
    last = [x for x in A[-1] if x is not None] if n else []
    if not n or len(last) != n:
        raise ValueError(f"figures: the last row of A has {len(last)} of {n} tasks; ask all of them at the end")
    if n == 1 or A[0][0] is None:
        return ForgettingMetrics(sum(last) / n, None, None, None)
    return ForgettingMetrics(average_accuracy(A), backward_transfer(A), forgetting(A), plasticity(A))


def average_accuracy(A: AccuracyRows) -> float:
    """AA = (1/n) sum over j of A[n-1, j]."""
    return sum(A[-1][j] or 0.0 for j in range(len(A))) / len(A)


def backward_transfer(A: AccuracyRows) -> float:
    """BWT = 1/(n-1) sum over j < n-1 of A[n-1, j] - A[j, j]."""
    return sum((A[-1][j] or 0.0) - (A[j][j] or 0.0) for j in range(len(A) - 1)) / (len(A) - 1)


def forgetting(A: AccuracyRows) -> float:
    """F = 1/(n-1) sum over j < n-1 of the best A[i, j], j <= i < n-1, less A[n-1, j]; below 0 where tasks gained."""
    n = len(A)
    best = [max(A[i][j] or 0.0 for i in range(j, n - 1)) for j in range(n - 1)]
    return sum(best[j] - (A[-1][j] or 0.0) for j in range(n - 1)) / (n - 1)


def plasticity(A: AccuracyRows) -> float:
    """(1/n) sum over j of A[j, j]: what was right of each task when it had just been learned."""
    return sum(A[j][j] or 0.0 for j in range(len(A))) / len(A)


def estimate_metrics(matrices: Sequence[AccuracyRows]) -> dict[str, Estimate]:
    """Each figure over the orders, with its 95 % interval; those that the matrices do not give are left out."""
    found = [compute_metrics(A) for A in matrices]
    columns = {name: [getattr(one, name) for one in found] for name in METRIC_NAMES}
    return {
        name: statistics.estimate_mean([[x] for x in column])
        for name, column in columns.items()
        if all(x is not None for x in column)
    }


def metrics_to_json(found: dict[str, Estimate]) -> dict[str, Any]:
    """As JSON holds them; the `questions` of an estimate are one a seed here and left out."""
    return {name: {k: v for k, v in one._asdict().items() if k != "questions"} for name, one in found.items()}
