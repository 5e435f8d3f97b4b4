"""Class-incremental runs shown: the table, the matrices, the curves."""

import re
from typing import Any

import pytest

from laconic.evaluation.class_incremental.metrics import estimate_metrics, metrics_to_json
from laconic.evaluation.class_incremental.report import HEADER, build_figures, build_table, format_metric, mean_matrix
from tests.conftest import needs

A = [[0.9, None], [0.1, 0.7]]
B = [[0.7, None], [0.3, 0.5]]
ONCE = [[None, None], [0.8, 0.6]]


def way(*matrices: list[list[float | None]]) -> dict[str, Any]:
    return {"figures": metrics_to_json(estimate_metrics(matrices)), "matrices": list(matrices)}


FOUND = {
    "set": "four",
    "methods": {
        "learner": {
            "ways": {"seen": way(A, B), "all": way(A, A), "seen-prior": way(B, B)},
            "notes": [{"updates": [1200, 3], "state_bytes": 12345}],
        },
        "joint": {"ways": {"seen": way(ONCE, ONCE), "all": way(ONCE, ONCE)}, "notes": [{}]},
    },
}


def test_the_table() -> None:
    header, learner, joint = build_table(FOUND)
    assert header == list(HEADER)
    assert learner[0] == "learner"
    assert learner[1].startswith("40.0 (")
    assert learner[3].startswith("-60.0 (")
    assert learner[4].startswith("60.0 (")
    assert learner[5].startswith("70.0 (")
    assert learner[6:] == ["40.0 (40.0 to 40.0)", "1,200, 3", "12,345"]
    assert joint == ["joint", "70.0 (70.0 to 70.0)", "70.0 (70.0 to 70.0)", "–", "–", "–", "–", "–", "–"]
    assert format_metric({"mean": 0.5, "sd": None, "low": 0.5, "high": 0.5}) == "50.0"


def test_means_of_matrices() -> None:
    assert mean_matrix([A, B]) == [[pytest.approx(0.8), None], [pytest.approx(0.2), pytest.approx(0.6)]]
    assert mean_matrix([ONCE])[0] == [None, None]


def test_the_drawings() -> None:
    needs("matplotlib")
    made = build_figures(FOUND)
    assert [title for title, _, _ in made] == ["four, task after task", "four, learner"]
    assert "right at the end: learner 40 %; joint 70 %." in made[0][2]
    assert "per cent right on each task at the end: 20, 60" in made[1][2]
    assert len(re.findall(r"<svg", "".join(svg for _, _, svg in made))) == 2
    assert made == build_figures(FOUND)
