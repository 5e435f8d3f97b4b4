"""Class-incremental metrics: average accuracy, backward transfer, forgetting, plasticity.

A[i, j] is the accuracy on task j after task i, i and j from 0 to n - 1, j <= i. Backward transfer is that of Lopez-Paz
and Ranzato 2017 (arXiv:1706.08840), forgetting that of Chaudhry et al. 2018 (arXiv:1801.10112).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from laconic.evaluation import statistics
from laconic.evaluation.statistics import Estimate

AccuracyRows = Sequence[Sequence[float | None]]
METHODS = ("learner", "frozen", "icl", "ncm", "ncm-shared", "finetune", "ewc", "replay", "joint")


class ForgettingMetrics(NamedTuple):
    """Metrics of one class order; None if A has only its last row, or one task."""

    AA: float
    BWT: float | None
    forgetting: float | None
    plasticity: float | None


def compute_metrics(A: AccuracyRows) -> ForgettingMetrics:
    """Return the metrics of an accuracy matrix. Raises `ValueError` if its last row is incomplete."""
    n = len(A)
    last = [x for x in A[-1] if x is not None] if n else []
    if not n or len(last) != n:
        raise ValueError(f"the last row of A has {len(last)} of {n} tasks; evaluate all tasks at the end")
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
    """F = 1/(n-1) sum over j < n-1 of the best A[i, j], j <= i < n-1, less A[n-1, j]; below 0 if tasks improved."""
    n = len(A)
    best = [max(A[i][j] or 0.0 for i in range(j, n - 1)) for j in range(n - 1)]
    return sum(best[j] - (A[-1][j] or 0.0) for j in range(n - 1)) / (n - 1)


def plasticity(A: AccuracyRows) -> float:
    """(1/n) sum over j of A[j, j]: the accuracy on each task right after it was learned."""
    return sum(A[j][j] or 0.0 for j in range(len(A))) / len(A)


def estimate_metrics(matrices: Sequence[AccuracyRows]) -> dict[str, Estimate]:
    """Return each metric over class orders with its 95 % interval, without those that the matrices do not give."""
    metrics = [compute_metrics(A) for A in matrices]
    columns = zip(ForgettingMetrics._fields, zip(*metrics, strict=True), strict=True)
    return {name: statistics.estimate_mean([[x] for x in column]) for name, column in columns if None not in column}


def metrics_to_json(estimates: dict[str, Estimate]) -> dict[str, Any]:
    """Return estimates as JSON values, without `num_items`, which is always 1 per order."""
    return {
        name: {key: value for key, value in estimate._asdict().items() if key != "num_items"}
        for name, estimate in estimates.items()
    }
