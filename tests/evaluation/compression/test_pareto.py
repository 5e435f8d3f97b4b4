"""Learned lengths against the line through fixed ones."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from laconic.evaluation.compression import scores
from laconic.evaluation.compression.scores import FIXED_LENGTH, LEARNED_LENGTH, TEXT_END
from laconic.evaluation.suite import RunResult
from tests.evaluation.compression.results import fixed_lengths, make_condition, make_result

N = 8


def learned(better: float, noise: float = 0.02) -> list[dict[str, dict[str, Any]]]:
    """Documents with 1 or 3 vectors in turn, `better` nats per token than with two vectors each."""
    return [
        fixed_lengths(d)
        | {"compressed": make_condition(2.0 + 0.1 * d - better + noise * (-1) ** (d // 2), 12, (1 + 2 * (d % 2),))}
        for d in range(N)
    ]


def compare(results: list[RunResult]) -> list[scores.LengthComparison]:
    return scores.compare_learned_lengths([point for result in results for point in scores.pareto_points(result)])


@pytest.mark.parametrize(
    ("better", "message"), [(0.05, "above the line"), (0.0, "no difference shown"), (-0.05, "below the line")]
)
def test_compare_learned_lengths_needs_two_standard_errors(better: float, message: str) -> None:
    (result,) = compare([make_result("stop", learned(better))])
    conditions = [better - 0.02 * (-1) ** (d // 2) for d in range(N)]
    mean = sum(conditions) / N
    se = math.sqrt(sum((x - mean) ** 2 for x in conditions) / (N - 1) / N)
    assert (result.point.mean_point[0], result.baseline) == (2, "its own")
    assert result.difference == pytest.approx(mean, abs=1e-12)
    assert result.se == pytest.approx(se)
    assert result.verdict == message


def test_interpolate_quality_is_linear_for_each_document() -> None:
    ways = [conditions | {"compressed": make_condition(1.0, 12, (3,))} for conditions in map(fixed_lengths, range(N))]
    points = [p for p in scores.pareto_points(make_result("stop", ways)) if p.kind == FIXED_LENGTH]
    for x, expected in ((1.0, 2.2), (3.0, 1.8), (3.5, 1.7), (4.0, 1.6), (4.1, 1.6)):
        on_line = scores.interpolate_quality(points, x, 0)
        assert on_line is not None
        assert on_line == pytest.approx([-(expected + 0.1 * d) for d in range(N)])
    assert scores.interpolate_quality(points, 0.9, 0) is None
    assert scores.interpolate_quality([], 1.0, 0) is None


def test_compare_learned_lengths_with_runs_of_fixed_length_on_the_same_documents() -> None:
    stop = make_result("stop", learned(0.0))
    runs = [
        make_result(
            f"n{n}",
            [{"none": fixed_lengths(d)["none"], "compressed": fixed_lengths(d)[f"n = {n}"]} for d in range(N)],
            length_policy="fixed",
        )
        for n in (1, 4)
    ]
    result = compare([stop, *runs])
    assert [v.baseline for v in result] == ["its own", "runs of fixed length"]
    assert result[1].fixed_quality == pytest.approx(-(2.0 + 0.1 * 3.5))
    pooled = [replace(run, run=f"pool-{run.run}", info={**run.info, "summary": "pool"}) for run in runs]
    both = compare([stop, *pooled, *runs])
    assert [comparison[1:] for comparison in both] == [comparison[1:] for comparison in result]
    assert [v.baseline for v in compare([stop, *pooled])] == ["its own"]
    short = [v for v in compare([stop, runs[0]]) if v.baseline == "runs of fixed length"]
    assert [v.fixed_quality for v in short] == [pytest.approx(-(2.2 + 0.1 * 3.5))]  # one vector, of those that kept two


def test_pareto_points_kinds() -> None:
    ways = learned(0.0)
    for conditions in ways:
        conditions["end, n = 2"] = make_condition(2.9, 5, (), context_size=2)
    points = scores.pareto_points(make_result("stop", ways, seeds=2))
    assert {p.kind for p in points} == {FIXED_LENGTH, LEARNED_LENGTH, TEXT_END}
    assert next(p for p in points if p.kind == TEXT_END).mean_point == (2.0, -2.9)


def test_seed_document_error_includes_seeds() -> None:
    apart = np.array([[0.0, 0.2], [0.4, 0.6]])
    documents, seeds = np.std([0.2, 0.4], ddof=1) / 2**0.5, np.std([0.1, 0.5], ddof=1) / 2**0.5
    assert scores.seed_document_error(apart) == pytest.approx(math.hypot(documents, seeds))
