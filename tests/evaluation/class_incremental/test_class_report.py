"""Class-incremental report: table, mean matrices, plots."""

from typing import Any

from laconic.evaluation.class_incremental.protocol import estimate_metrics, metrics_to_json
from laconic.evaluation.class_incremental.report import (
    COLUMNS,
    build_method_table,
    build_plots,
    format_metric,
)
from tests.conftest import needs

A = [[0.9, None], [0.1, 0.7]]
B = [[0.7, None], [0.3, 0.5]]
ONCE = [[None, None], [0.8, 0.6]]


def result(*matrices: list[list[float | None]], notes: list[dict[str, Any]]) -> dict[str, Any]:
    return {"metrics": metrics_to_json(estimate_metrics(matrices)), "matrices": list(matrices), "notes": notes}


RESULTS = {
    "set": "four",
    "methods": {
        "learner": result(A, B, notes=[{"updates": [1200, 3], "state_bytes": 12345}]),
        "joint": result(ONCE, ONCE, notes=[{}]),
    },
}


def test_build_method_table() -> None:
    table = build_method_table(RESULTS)
    learner, joint = table.rows
    assert table.header == [column.title for column in COLUMNS]
    assert learner[0] == "learner"
    assert learner[1].startswith("40.0 (")
    assert learner[2].startswith("-60.0 (")
    assert learner[3].startswith("60.0 (")
    assert learner[4].startswith("70.0 (")
    assert learner[5:] == ["1,200, 3", "12,345"]
    assert joint == ["joint", "70.0 (70.0 to 70.0)", "–", "–", "–", "–", "–"]
    assert format_metric({"mean": 0.5, "sd": None, "low": 0.5, "high": 0.5}) == "50.0"


def test_build_plots() -> None:
    needs("matplotlib")
    plots = build_plots(RESULTS)
    assert [plot.title for plot in plots] == ["four, task after task", "four, learner"]
    assert "learner ends at 40; joint ends at 70" in plots[0].image
    assert "accuracy in percent on each task at the end: 20, 60" in plots[1].image
