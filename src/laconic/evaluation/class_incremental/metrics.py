"""Class-incremental metrics: average accuracy, backward transfer, forgetting, plasticity.

A[i, j] is the accuracy on task j after task i, i and j from 0 to n - 1, j <= i. Backward transfer is that of Lopez-Paz
and Ranzato 2017 (arXiv:1706.08840), forgetting that of Chaudhry et al. 2018 (arXiv:1801.10112).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from laconic.evaluation import statistics
from laconic.evaluation.statistics import Estimate

AccuracyRows = Sequence[Sequence[float | None]]
METHODS = ("learner", "frozen", "icl", "ncm", "ncm-shared", "finetune", "lora", "ewc", "replay", "joint")


class ForgettingMetrics(NamedTuple):
    """Metrics of one class order; None if A has only its last row, or one task."""

    AA: float
    BWT: float | None
    forgetting: float | None
    plasticity: float | None


def compute_metrics(A: AccuracyRows) -> ForgettingMetrics:
    """Return the metrics of an accuracy matrix, whose last row is complete.

    AA = (1/n) sum over j of A[n-1, j]. BWT = 1/(n-1) sum over j < n-1 of A[n-1, j] - A[j, j]. Forgetting = 1/(n-1) sum
    over j < n-1 of the best A[i, j], j <= i < n-1, less A[n-1, j]; below 0 if tasks improved. Plasticity = (1/n) sum
    over j of A[j, j], the accuracy on each task right after it was learned.
    """
    n = len(A)
    matrix = np.array(A, dtype=np.float64)  # NaN for None
    last = matrix[-1]
    learned = matrix.diagonal()
    if n == 1 or A[0][0] is None:
        return ForgettingMetrics(float(last.mean()), None, None, None)
    best = np.nanmax(matrix[:-1, :-1], axis=0)
    values = last.mean(), (last - learned)[:-1].mean(), (best - last[:-1]).mean(), learned.mean()
    return ForgettingMetrics(*map(float, values))


def estimate_metrics(matrices: Sequence[AccuracyRows]) -> dict[str, Estimate]:
    """Return each metric over class orders with its 95 % interval, without those that the matrices do not give."""
    metrics = [compute_metrics(A) for A in matrices]
    columns = zip(ForgettingMetrics._fields, zip(*metrics, strict=True), strict=True)
    return {name: estimate_share(name, column) for name, column in columns if None not in column}


def estimate_share(name: str, values: Sequence[float]) -> Estimate:
    """Return the mean of a metric over class orders, with an interval inside the range of its values."""
    estimate = statistics.estimate_mean([[x] for x in values])
    lowest = 0.0 if name in ("AA", "plasticity") else -1.0
    return estimate._replace(low=max(estimate.low, lowest), high=min(estimate.high, 1.0))


def metrics_to_json(estimates: dict[str, Estimate]) -> dict[str, Any]:
    """Return estimates as JSON values, without `num_items`, which is always 1 per order."""
    return {
        name: {key: value for key, value in estimate._asdict().items() if key != "num_items"}
        for name, estimate in estimates.items()
    }
