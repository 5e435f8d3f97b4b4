"""One question looked into: thought about once, with every intervention that is possible."""

from typing import Any

import pytest

from laconic.evaluation.inspection.inspected_run import InspectedRun
from laconic.evaluation.inspection.interventions import list_interventions
from laconic.evaluation.inspection.question import inspect_question
from tests.evaluation.test_inspect_dataset import Rows, subject

__all__ = ["subject"]  # the fixture


def test_a_question_is_thought_about_once(subject: InspectedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, think = list[bool](), type(subject).think

    def count(run: Any, questions: Any, intervention: Any = None, record_passes: bool = False) -> Any:
        calls.append(intervention is None)
        return think(run, questions, intervention, record_passes)

    monkeypatch.setattr(type(subject), "think", count)
    result = inspect_question(subject, Rows().batch([0], 0, 0))
    assert calls == [True, *[False] * 3]  # interventions on vectors think again
    assert len(result.lens.passes) == 3
    assert result.chain.selections[result.chain.policy].sum(-1).tolist() == [[4, 4]] * 2
    assert [(len(rows), len(rows[0])) for rows in result.chain.scores] == [(4, len(result.lens.chain))] * 3


@pytest.mark.parametrize("has_others", [True, False])
def test_every_possible_intervention_is_made_and_reported(subject: InspectedRun, has_others: bool) -> None:
    reports = list[tuple[str, int, int]]()
    result = inspect_question(
        subject, Rows().batch([0], 0, 0), Rows() if has_others else None, progress=lambda *x: reports.append(x)
    )
    possible = [x for x in list_interventions(4) if has_others or x.kind not in ("mean", "swap")]
    assert [item[:2] for item in result.effects] == possible
    assert [done for _, done, _ in reports] == list(range(len(reports)))
    assert all(len(reports) <= total for _, _, total in reports[1:])
