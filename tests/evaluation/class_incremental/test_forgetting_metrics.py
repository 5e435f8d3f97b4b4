"""Class-incremental metrics against loops, and the misreading that includes the last row."""

import pytest
import torch

from laconic.evaluation.class_incremental.protocol import compute_metrics, estimate_metrics, metrics_to_json
from tests.oracles import class_incremental as oracle

N = 6


def random_matrix(seed: int) -> list[list[float | None]]:
    A = torch.rand(N, N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    return [[x if j <= i else None for j, x in enumerate(row)] for i, row in enumerate(A)]


def fill_missing(A: list[list[float | None]]) -> list[list[float]]:
    return [[-1.0 if x is None else x for x in row] for row in A]


@pytest.mark.parametrize("seed", range(5))
def test_compute_metrics_matches_loop_oracle(seed: int) -> None:
    A = random_matrix(seed)
    got, B = compute_metrics(A), fill_missing(A)
    expected = (oracle.average_accuracy(B), oracle.backward_transfer(B), oracle.forgetting(B), oracle.plasticity(B))
    assert got == pytest.approx(expected, abs=1e-12)


def test_forgetting_misread_with_last_row_differs() -> None:
    """A task that improves at the end has negative forgetting."""
    A: list[list[float | None]] = [[0.5, None, None], [0.4, 0.6, None], [0.9, 0.2, 0.7]]
    got = compute_metrics(A).forgetting
    assert got == pytest.approx((0.5 - 0.9 + 0.6 - 0.2) / 2)
    assert got == pytest.approx(oracle.forgetting(fill_missing(A)))
    assert abs(oracle.forgetting(fill_missing(A), last_row=True) - oracle.forgetting(fill_missing(A))) > 1e-3


def test_forgetting_includes_the_diagonal() -> None:
    A: list[list[float | None]] = [[0.9, None, None], [0.4, 0.6, None], [0.1, 0.2, 0.7]]
    assert compute_metrics(A).forgetting == pytest.approx(oracle.forgetting(fill_missing(A)))
    assert compute_metrics([[0.9, None], [0.1, 0.7]]).forgetting == pytest.approx(0.8)


def test_compute_metrics_of_last_row_only() -> None:
    once: list[list[float | None]] = [[None, None], [0.25, 0.75]]
    assert compute_metrics(once) == (0.5, None, None, None)
    assert list(estimate_metrics([once, once])) == ["AA"]


def test_estimate_metrics_over_orders() -> None:
    estimates = estimate_metrics([random_matrix(seed) for seed in range(5)])
    metrics = [compute_metrics(random_matrix(seed)) for seed in range(5)]
    for name, one in estimates.items():
        values = [getattr(f, name) for f in metrics]
        assert one.mean == pytest.approx(sum(values) / 5)
        assert one.low < one.mean < one.high
        assert (one.num_seeds, one.num_items) == (5, 1)
    assert set(metrics_to_json(estimates)["BWT"]) == {"mean", "sd", "low", "high", "num_seeds"}
