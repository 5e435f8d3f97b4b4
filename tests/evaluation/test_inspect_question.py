"""One question looked into: thought once, single slots edited as was asked, and what is kept for each slot."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic.evaluation.inspection import question
from laconic.evaluation.inspection.inspected_run import InspectedRun, SelectorChoice
from laconic.evaluation.inspection.interventions import InterventionSpec
from laconic.evaluation.inspection.kv_selection import best_token_per_slot
from laconic.evaluation.inspection.question import inspect_question
from laconic.latent.rkv import SelectedColumns
from tests.evaluation.test_inspect_dataset import Rows, subject

__all__ = ["subject"]  # the fixture


def test_a_question_is_thought_about_once(subject: InspectedRun) -> None:
    calls = list[bool]()

    def think(
        questions: Any, intervention: Any = None, record_passes: bool = False, iterations: int | None = None
    ) -> Any:
        calls.append(intervention is None)
        return subject.think(questions, intervention, record_passes, iterations)

    result = inspect_question(
        replace(subject, think=think), Rows().batch([0], 0, 0), [InterventionSpec("zero", "cache")]
    )
    assert calls == [True]
    assert len(result.lens.passes) == 3
    (selection,) = (selection for selection in result.selections if selection.policy == result.policy)
    assert selection.mask.sum(-1).tolist() == [[4, 4]] * 2
    assert len(result.best_tokens) == 4


@pytest.mark.parametrize(
    ("requested", "alone"),
    [
        ([], []),
        ([InterventionSpec("noise"), InterventionSpec("shuffle")], []),
        ([InterventionSpec("zero")], [("zero", "vectors", m) for m in range(4)]),
        ([InterventionSpec("zero", "cache", (1, 3))], [("zero", "cache", 1), ("zero", "cache", 3)]),
        ([InterventionSpec("swap", where, (2,)) for where in ("cache", "vectors")], [("swap", "vectors", 2)]),
    ],
)
def test_slots_alone_are_those_asked_for(
    subject: InspectedRun,
    requested: list[InterventionSpec],
    alone: list[tuple[str, str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(question, "NUM_MEAN_QUESTIONS", 4)
    reports = list[tuple[str, int, int]]()
    result = inspect_question(
        subject, Rows().batch([0], 0, 0), requested, Rows(), progress=lambda *report: reports.append(report)
    )
    assert [done for _, done, _ in reports] == list(range(len(reports)))
    assert all(len(reports) <= total for _, _, total in reports[1:])
    assert [item.spec for item in result.effects] == requested
    assert [(e.spec.kind, e.spec.target, *(e.spec.slots or ())) for e in result.slot_effects] == alone


def test_what_most_heads_keep_for_a_slot_stands_for_it() -> None:
    """Two layers of two heads and two slots; the second slot of one head has no token."""
    selected: Any = tuple(
        SelectedColumns(torch.tensor([index]), torch.tensor([live]))
        for index, live in (
            ([[0, 2], [1, 2]], [[True, True], [True, True]]),
            ([[1, 1], [1, 0]], [[True, True], [True, False]]),
        )
    )
    left: Any = SimpleNamespace(choices={"rkv": SelectorChoice(selected, ())}, policy="rkv", matched_layers=(0, 1))
    assert best_token_per_slot(left, "abc") == (("b", 0.75), ("c", pytest.approx(2 / 3)))
    none: Any = SelectedColumns(torch.zeros(1, 1, 1, dtype=torch.long), torch.zeros(1, 1, 1) > 0)
    left.choices, left.matched_layers = {"rkv": SelectorChoice((none,), ())}, (0,)
    assert best_token_per_slot(left, "abc") == (("–", 0.0),)
